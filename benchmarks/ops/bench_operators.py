# SPDX-License-Identifier: Apache-2.0
"""The compiled operators against their floors, as ratios within one run.

    OMP_NUM_THREADS=1 python -m benchmarks.ops.bench_operators

One thread. The floor of an operator that moves data is its bytes over the read bandwidth of this
machine, measured in the same run; that of a control operator is the number in the table. The
references are those of vllm_echo/reference. Runs that are compared take turns, and the medians
are quoted.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from vllm_echo import ops
from vllm_echo.core.decision import Rule
from vllm_echo.reference import accept as reference_accept
from vllm_echo.reference import pack as reference_pack
from vllm_echo.reference import schedule as reference_schedule
from vllm_echo.reference.schedule import Node

VOCABULARY = 49152
REQUESTS, NODES_EACH, CANDIDATES = 256, 4, 24
CONTROL_US = 300
LEAST_SPEEDUP = 20
MOST_OVER_BYTES = 1.5
MIB = 1 << 20
CACHE_LINE, ELEMENT = 64, 2
Run = Callable[[], object]


@dataclass
class Line:
    """A row of the table; a ratio is to the floor, and at most ``bar`` is asked for."""

    operator: str
    case: str
    us: float
    floor_us: float
    ratio: float
    bar: float

    @property
    def met(self) -> bool:
        return self.ratio <= self.bar

    def cells(self) -> str:
        times = f"{self.us:.1f} | {self.floor_us:.1f} | {self.ratio:.2f} | {self.bar:.2f}"
        return f"| {self.operator} | {self.case} | {times} | {'yes' if self.met else 'NO'} |"


def medians_us(runs: list[Run], seconds: float) -> list[float]:
    """Median of each, taking turns, so that a disturbance meets all of them."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times[0]) < 5:
        for run, spent in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            spent.append(time.perf_counter() - start)
    return [1e6 * statistics.median(spent) for spent in times]


def random_candidates(source: random.Random) -> list[list[Node]]:
    """Trees of ``CANDIDATES`` nodes: each hangs below an earlier one, scores fall along paths."""
    requests = []
    for _ in range(REQUESTS):
        nodes: list[Node] = []
        for index in range(CANDIDATES):
            parent = source.randint(-1, index - 1)
            above = Node(0, -1, 0, 0.0) if parent < 0 else nodes[parent]
            score = reference_schedule.to_float32(above.score - source.uniform(0.05, 1.5))
            nodes.append(Node(source.randrange(VOCABULARY), parent, above.depth + 1, score))
        requests.append(nodes)
    return requests


def control(seconds: float) -> list[Line]:
    """Order and counts of ``REQUESTS`` under a budget, the super-tree, and the walk over it."""
    requests = random_candidates(random.Random(0))
    budget = REQUESTS * NODES_EACH
    tokens_of, parents_of, depths_of, scores_of = (
        torch.tensor([[node[field] for node in nodes] for nodes in requests], dtype=dtype)
        for field, dtype in enumerate((torch.int32, torch.int32, torch.int32, torch.float32))
    )
    caps = torch.full((REQUESTS,), 8, dtype=torch.int32)
    gates = [0.2, None, 0.1, None, 0.05, None]
    thresholds = torch.tensor([torch.nan if gate is None else gate for gate in gates])
    limits = (caps, caps, thresholds, Rule.GATES, True, 8)

    def schedule() -> tuple[torch.Tensor, ...]:
        *trees, keys = ops.order_trees(tokens_of, parents_of, depths_of, scores_of, *limits)
        return (*trees, ops.admit_nodes(keys, budget))

    tokens, parents, depths, num_nodes = schedule()
    assert int(num_nodes.sum()) == budget

    def pack() -> tuple[torch.Tensor, ...]:
        return ops.pack_trees(tokens, parents, depths, num_nodes)

    cu_rows, row_tokens, row_parents, _, _ = pack()
    targets = row_tokens.roll(-1).clamp(min=0).long()

    def walk() -> tuple[torch.Tensor, ...]:
        return ops.accept_paths(targets, cu_rows, row_tokens, row_parents)

    assert int(walk()[2].sum()) > REQUESTS / 2

    def obvious() -> None:
        places = []
        for nodes in requests:
            layers = reference_schedule.pass_gates(nodes, 8, 8, gates)
            counted = [node for node in nodes if node.depth <= layers.last]
            places.append(reference_schedule.places_by_gates(counted, 8, layers, True))
        counts = reference_schedule.admit_nodes(places, budget)
        best_nodes = [
            reference_schedule.take_best(nodes, count)
            for nodes, count in zip(requests, counts, strict=True)
        ]
        reference_pack.pack_trees(best_nodes)
        reference_accept.accept_paths(targets, cu_rows, row_tokens, row_parents)

    def all_three() -> None:
        schedule(), pack(), walk()

    parts = medians_us([schedule, pack, walk, all_three], seconds)
    (reference,) = medians_us([obvious], 0)
    case = f"{REQUESTS} requests, {budget} nodes"
    names = ("order_trees, admit_nodes", "pack_trees", "accept_paths", "all three")
    lines = [
        Line(name, case, us, CONTROL_US, us / CONTROL_US, 1.0)
        for name, us in zip(names, parts, strict=True)
    ]
    slower = reference / parts[3]
    share = LEAST_SPEEDUP / slower
    lines.append(Line("all three", f"reference {slower:.0f} times", parts[3], reference, share, 1))
    return lines


def rows_of_chains(num_requests: int, nodes: int) -> tuple[torch.Tensor, ...]:
    """cu_rows, tokens, parents: chains whose node at depth d carries token d."""
    rows = 1 + nodes
    cu_rows = torch.arange(num_requests + 1, dtype=torch.int32) * rows
    tokens = torch.arange(rows, dtype=torch.int32).repeat(num_requests)
    parents = torch.arange(-1, nodes, dtype=torch.int32).repeat(num_requests)
    return cu_rows, tokens, parents


def reading_logits(seconds: float, dtype: torch.dtype) -> list[Line]:
    """``accept_greedy`` where all rows, and where only the roots are visited."""
    lines = []
    bandwidth = read_bandwidth(seconds)
    for num_requests, nodes, accepted in ((1, 0, 0), (16, 3, 3), (64, 7, 0), (64, 3, 1)):
        cu_rows, tokens, parents = rows_of_chains(num_requests, nodes)
        logits = torch.randn(tokens.shape[0], VOCABULARY).to(dtype)
        next_token = (tokens + 1) * (tokens < accepted) + (tokens >= accepted) * 99
        logits.scatter_(1, next_token[:, None].long(), 50.0)
        visited = num_requests * (1 + accepted)
        trees = (cu_rows, tokens, parents)
        assert int(ops.accept_greedy(logits, *trees)[2].sum()) == num_requests * accepted
        (us,) = medians_us([partial(ops.accept_greedy, logits, *trees)], seconds)
        num_bytes = visited * VOCABULARY * dtype.itemsize
        floor = 1e6 * num_bytes / bandwidth
        case = f"{visited} of {logits.shape[0]} rows, {num_bytes / MIB:.1f} MiB {str(dtype)[6:]}"
        lines.append(Line("accept_greedy", case, us, floor, us / floor, MOST_OVER_BYTES))
    return lines


def moving_kv(seconds: float) -> list[Line]:
    """``commit_kv`` of the demo model's shape. Keys lie dim by dim in vLLM's CPU cache, so every
    number of a key has a cache line of its own, and scattered lines come far slower than the
    bandwidth of a stream: the floor is PyTorch reading one number of each line."""
    lines = []
    layers, kv_heads, head_dim, block = 30, 3, 64, 128
    for num_requests, length in ((1, 4), (16, 3), (64, 2)):
        blocks_each = 4
        caches = [
            torch.randn(num_requests * blocks_each, kv_heads, block, 2 * head_dim).bfloat16()
            for _ in range(layers)
        ]
        table = torch.randperm(num_requests * blocks_each, dtype=torch.int32).view(-1, blocks_each)
        roots = torch.randint(10, 300, (num_requests,), dtype=torch.int32)
        rows = (2 + torch.arange(length, dtype=torch.int32)).repeat(num_requests, 1)
        lens = torch.full((num_requests,), length, dtype=torch.int32)
        places = torch.cat(
            [
                line_numbers(table[r], int(roots[r]), length, kv_heads, head_dim, block)
                for r in range(num_requests)
            ]
        ).unique()
        us, floor = medians_us(
            [
                partial(ops.commit_kv, caches, table, roots, rows, lens),
                partial(read_places, [cache.view(-1) for cache in caches], places),
            ],
            seconds,
        )
        num_bytes = places.numel() * layers * CACHE_LINE
        case = f"{num_requests} paths of {length}, {layers} layers, {num_bytes / MIB:.1f} MiB"
        lines.append(Line("commit_kv", case, us, floor, us / floor, MOST_OVER_BYTES))
    return lines


def read_places(caches: list[torch.Tensor], places: torch.Tensor) -> None:
    for cache in caches:
        cache.index_select(0, places)


def line_numbers(
    blocks: torch.Tensor, root: int, length: int, kv_heads: int, head_dim: int, block: int
) -> torch.Tensor:
    """Elements of a layer's cache, one in each cache line that rows root + 1 to root + 1 + length
    of a request lie in; lines in which several lie may come twice."""
    per_line = CACHE_LINE // ELEMENT
    found = []
    for slot in range(root + 1, root + 2 + length):
        start = int(blocks[slot // block]) * kv_heads * block * 2 * head_dim
        heads = start + torch.arange(kv_heads)[:, None] * block * 2 * head_dim
        keys = heads + torch.arange(head_dim) * block + slot % block
        values = heads + head_dim * (block + slot % block) + torch.arange(0, head_dim, per_line)
        found += [keys.flatten(), values.flatten()]
    return torch.cat(found) // per_line * per_line


def read_bandwidth(seconds: float) -> float:
    """Bytes a second that one thread reads from memory."""
    numbers = torch.zeros(256 * MIB // 8, dtype=torch.int64)
    (us,) = medians_us([numbers.sum], seconds)
    return numbers.nbytes / us * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="time for one comparison")
    parser.add_argument("--output", type=Path, help="write the lines as JSON, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = [
        *control(args.seconds),
        *reading_logits(args.seconds, torch.bfloat16),
        *reading_logits(args.seconds, torch.float32),
        *moving_kv(args.seconds),
    ]
    print(f"{ops.build_info()}, {read_bandwidth(args.seconds) / 1e9:.1f} GB/s read by one thread\n")
    print("| operator | case | us | floor, us | ratio | at most | met |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(line.cells() for line in lines))
    if args.output:
        args.output.write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")


if __name__ == "__main__":
    main()
