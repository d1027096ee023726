# SPDX-License-Identifier: Apache-2.0
"""The CUDA operators on a GPU: right, clean, and how fast. `make gpu-check` builds and runs this.

    python -m benchmarks.ops.gpu_check --output gpu-check

Needs PyTorch 2.11 or newer with CUDA, pytest and hypothesis; no vLLM. Three parts, each of which
may fail on its own: comparisons with the CPU operators (tests/cuda), compute-sanitizer's memcheck
and racecheck over the small ones, and times, beside the bytes that have to move at the bandwidth
that a copy reaches in the same run, and beside the obvious PyTorch. Writes check.json and check.md.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vllm_echo import ops
from vllm_echo.core.decision import Rule

ROOT = Path(__file__).parents[2]
COMPARISONS = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda/test_kernels.py", "-k"]
ALL = "forwards or refused"  # the order of threads is the device's
SMALL = "forwards and not 4099 and not 600 and not 255"
LIMIT_S = 150
MIB = 1 << 20
LIBRARY = torch.ops.vllm_echo

# Llama-3.1-8B on one GPU, 256 requests with 8 nodes each.
REQUESTS, NODES, VOCABULARY = 256, 8, 128256
HEADS, KV_HEADS, HEAD_DIM, LAYERS, BLOCK = 32, 8, 128, 32, 16
CANDIDATES, DEPTHS = 24, 6


@dataclass
class Timing:
    operator: str
    case: str
    us: float
    floor_us: float
    torch_us: float
    torch_is: str


@dataclass
class Part:
    name: str
    verdict: str
    """passed, FAILED, or could not run"""
    said: str


def run(name: str, command: list[str], **environment: str) -> Part:
    """A part in a process of its own; its last lines are kept."""
    try:
        result = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "ECHO_GPU_CHECK": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return Part(name, "FAILED", f"it was not done after {LIMIT_S} s")
    verdict = "passed" if result.returncode == 0 else "FAILED"
    return Part(name, verdict, "\n".join(result.stdout.splitlines()[-15:]))


def sanitize(tool: str) -> Part:
    """Over memory that PyTorch does not keep in large pieces, inside which nothing is out of
    bounds."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return Part(tool, "could not run", "compute-sanitizer comes with the CUDA toolkit")
    options = ["--tool", tool, "--error-exitcode", "9", "--kernel-name", "regex=vllm_echo"]
    options += ["--report-api-errors", "no"]
    command = [program, *options, sys.executable, *COMPARISONS, SMALL]
    part = run(tool, command, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    if part.verdict == "FAILED" and "ERROR SUMMARY" not in part.said and "failed" not in part.said:
        part.verdict = "could not run"
    return part


def median_us(call: Callable[[], object], repeats: int = 30) -> float:
    """On a device whose cache holds something else."""
    sweep = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats + 5):
        sweep.fill_(1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[5:])


def bandwidth() -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_us(lambda: target.copy_(source)) * 1e6


def random_candidates() -> tuple[torch.Tensor, ...]:
    """Tokens, parents, depths, scores [R, C] on the CPU: layers of random trees."""
    source = random.Random(0)
    rows = []
    for _ in range(REQUESTS):
        nodes: list[tuple[int, int, int, float]] = []
        for index in range(CANDIDATES):
            shallow = [-1, *(i for i in range(index) if nodes[i][2] < DEPTHS)]
            parent = source.choice(shallow)
            depth, score = (0, 0.0) if parent < 0 else (nodes[parent][2], nodes[parent][3])
            nodes.append(
                (source.randrange(VOCABULARY), parent, depth + 1, score - source.uniform(0.05, 1.5))
            )
        rows.append(nodes)
    dtypes = (torch.int32, torch.int32, torch.int32, torch.float32)
    return tuple(
        torch.tensor([[node[field] for node in nodes] for nodes in rows], dtype=dtype)
        for field, dtype in enumerate(dtypes)
    )


def on_cpu(operator: Callable[..., Any], *arguments: Any) -> list[torch.Tensor]:
    """The CPU operator, with what it takes and gives carried there and back."""
    here = [a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments]
    return [tensor.cuda() for tensor in operator(*here)]


def schedule_on_cpu(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """What ``schedule_budget`` does, by the CPU's operators."""
    *candidates, budget, width, max_nodes = arguments
    *trees, keys = LIBRARY.order_trees(*candidates, Rule.GATES, width, max_nodes)
    return (*trees, LIBRARY.admit_nodes(keys, budget))


def time_control(rate: float) -> list[Timing]:
    caps = torch.full((REQUESTS,), NODES, dtype=torch.int32)
    thresholds = torch.tensor([0.2] + [torch.nan] * (DEPTHS - 1))
    tables = [tensor.cuda() for tensor in (*random_candidates(), caps, caps, thresholds)]
    candidates = (*tables, REQUESTS * NODES // 2, True, NODES)
    tokens, parents, depths, _, num_nodes = LIBRARY.schedule_budget(*candidates)[:5]
    rows = REQUESTS + int(num_nodes.sum())
    trees = (tokens, parents, depths, num_nodes, rows)
    cu_rows, flat_tokens, flat_parents, _, _ = LIBRARY.pack_trees(*trees)
    targets = flat_tokens.roll(-1).clamp(min=0).long()
    walks = (targets, cu_rows, flat_tokens, flat_parents, NODES)
    case = f"{REQUESTS} requests, {NODES} nodes each"
    timings = []
    schedule, pack, walk = LIBRARY.schedule_budget, LIBRARY.pack_trees, LIBRARY.accept_paths
    for operator, here, arguments, num_bytes in (
        (schedule, schedule_on_cpu, candidates, 16 * REQUESTS * (CANDIDATES + NODES)),
        (pack, pack, trees, 12 * REQUESTS * NODES + 20 * rows),
        (walk, walk, walks, 16 * rows + 8 * REQUESTS * NODES),
    ):
        ours = median_us(partial(operator, *arguments))
        other = median_us(partial(on_cpu, here, *arguments))
        name = operator.__name__
        floor = 1e6 * num_bytes / rate
        timings.append(Timing(name, case, ours, floor, other, "the CPU operator, there and back"))
    return timings


def time_logits(rate: float) -> list[Timing]:
    timings = []
    for requests, accepted in ((1, 3), (16, 3), (256, 0), (256, 2)):
        rows = 1 + NODES
        cu_rows = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * rows
        tokens = torch.arange(rows, dtype=torch.int32, device="cuda").repeat(requests)
        logits = torch.randn(requests * rows, VOCABULARY, device="cuda").bfloat16()
        chosen = torch.where(tokens < accepted, tokens + 1, 99).long()
        logits.scatter_(1, chosen[:, None], 50.0)
        trees = (logits, cu_rows, tokens, tokens - 1)
        draws = (
            tokens.clone(),
            torch.full((requests,), 0.8, device="cuda"),
            torch.arange(requests, device="cuda"),
            torch.full((requests,), 100, device="cuda"),
        )
        assert int(LIBRARY.accept_greedy(*trees, NODES)[2].sum()) == requests * accepted
        visited = requests * (1 + accepted)
        floor = 1e6 * visited * VOCABULARY * 2 / rate
        case = f"{visited} of {requests * rows} rows of {VOCABULARY} bf16"
        all_rows = median_us(partial(torch.argmax, logits, -1))
        for name, call in (
            ("accept_greedy", partial(LIBRARY.accept_greedy, *trees, NODES)),
            ("accept_sampled", partial(LIBRARY.accept_sampled, *trees, *draws, NODES)),
        ):
            us = median_us(call)
            timings.append(Timing(name, case, us, floor, all_rows, "argmax of all rows"))
    return timings


def copy_by_index(
    caches: list[torch.Tensor],
    come: tuple[torch.Tensor, torch.Tensor],
    to: tuple[torch.Tensor, torch.Tensor],
) -> None:
    for cache in caches:
        cache[:, to[0], to[1]] = cache[:, come[0], come[1]]


def time_commit(rate: float) -> list[Timing]:
    timings = []
    for requests, length in ((1, 4), (64, 3), (256, 2)):
        blocks_each = 4
        shape = (2, requests * blocks_each, BLOCK, KV_HEADS, HEAD_DIM)
        caches = [torch.randn(shape, device="cuda").bfloat16() for _ in range(LAYERS)]
        table = torch.randperm(requests * blocks_each, device="cuda").int().view(-1, blocks_each)
        roots = torch.randint(0, 40, (requests,), device="cuda").int()
        steps = torch.arange(length, device="cuda").int()
        lens = torch.full((requests,), length, device="cuda").int()
        come, to = (
            (table.gather(1, slots.long() // BLOCK).long(), slots.long() % BLOCK)
            for slots in (roots[:, None] + 2 + steps, roots[:, None] + 1 + steps)
        )
        rows = (2 + steps).repeat(requests, 1)
        us = median_us(partial(LIBRARY.commit_kv, caches, table, roots, rows, lens))
        other = median_us(partial(copy_by_index, caches, come, to))
        moved = 2 * requests * length * LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
        case = f"{requests} paths of {length}, {LAYERS} layers, {moved / MIB:.1f} MiB"
        floor = 1e6 * moved / rate
        timings.append(Timing("commit_kv", case, us, floor, other, "indexing, layer by layer"))
    return timings


def padded_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """All requests have as many rows as ``mask`` [n, n]."""
    q, k, v = (
        part.reshape(-1, mask.shape[0], part.shape[1], HEAD_DIM).transpose(1, 2)
        for part in (query, key, value)
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=mask, enable_gqa=True)


def time_attention(rate: float) -> list[Timing]:
    timings = []
    size = 1 + NODES
    visible = torch.eye(size, dtype=torch.bool)
    for row in range(1, size):
        visible[row] |= visible[(row - 1) // 2]
    bits = (visible.long() << torch.arange(size)).sum(dim=1)
    for requests in (1, 16, 256):
        rows = requests * size
        qkv = torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM, device="cuda").bfloat16()
        query, key, value = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        cu_rows = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * size
        ancestors = bits.repeat(requests)[:, None].cuda()
        us = median_us(
            partial(LIBRARY.tree_part_attention, query, key, value, cu_rows, ancestors, 0.09)
        )
        other = median_us(partial(padded_attention, query, key, value, visible.cuda()))
        floor = 1e6 * (qkv.numel() + rows * HEADS * HEAD_DIM) * 2 / rate
        case = f"{requests} requests of {size} rows, {HEADS}/{KV_HEADS} heads of {HEAD_DIM}"
        what = "masked attention, no lse"
        timings.append(Timing("tree_part_attention", case, us, floor, other, what))
    return timings


def report(parts: list[Part], timings: list[Timing], rate: float) -> str:
    architectures = ops.build_info()["cuda"]
    lines = [
        f"# {torch.cuda.get_device_name()}, PyTorch {torch.__version__}",
        "",
        f"Built for {architectures}. A copy of 1 GiB reads and writes {rate / 1e12:.2f} TB/s;",
        "the floor is the bytes at that rate. Medians of 30, the cache swept before each; a launch",
        "alone takes some microseconds.",
        "",
        "| check | verdict |",
        "|---|---|",
        *(f"| {part.name} | {part.verdict} |" for part in parts),
        "",
        "| operator | case | us | floor, us | obvious version, us | which is |",
        "|---|---|---|---|---|---|",
    ]
    for t in timings:
        times = f"{t.us:.1f} | {t.floor_us:.1f} | {t.torch_us:.1f}"
        lines.append(f"| {t.operator} | {t.case} | {times} | {t.torch_is} |")
    for part in parts:
        if part.verdict != "passed":
            lines += [
                "",
                f"{part.name} said:",
                "",
                *("    " + line for line in part.said.splitlines()),
            ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gpu-check"), help="a folder")
    parser.add_argument("--no-sanitizer", action="store_true", help="leave compute-sanitizer out")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_check: PyTorch sees no CUDA device; this check is for a machine that has one")
    if ops.build_info()["cuda"] == "none":
        sys.exit("gpu_check: the operators were built without CUDA; `make gpu-check` builds them")
    args.output.mkdir(parents=True, exist_ok=True)
    parts = [run("comparisons", [sys.executable, *COMPARISONS, ALL])]
    if not args.no_sanitizer:
        parts += [sanitize(tool) for tool in ("memcheck", "racecheck")]
    torch.manual_seed(0)
    rate = bandwidth()
    timings: list[Timing] = []
    for measure in (time_control, time_logits, time_commit, time_attention):
        save(args.output, parts, timings, rate)  # what there is, should a measurement fail
        timings += measure(rate)
    print(save(args.output, parts, timings, rate))
    sys.exit(any(part.verdict != "passed" for part in parts))


def save(folder: Path, parts: list[Part], timings: list[Timing], rate: float) -> str:
    """Writes check.json and check.md; returns the latter."""
    found = {
        "device": {"name": torch.cuda.get_device_name(), "bytes_per_second": rate},
        "parts": [asdict(part) for part in parts],
        "timings": [asdict(timing) for timing in timings],
    }
    (folder / "check.json").write_text(json.dumps(found, indent=1) + "\n")
    text = report(parts, timings, rate)
    (folder / "check.md").write_text(text)
    return text


if __name__ == "__main__":
    main()
