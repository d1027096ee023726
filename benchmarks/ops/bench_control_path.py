# SPDX-License-Identifier: Apache-2.0
"""What ECHO's own decisions cost: gate, schedule, pack, walk and commit bookkeeping of a step.

    python benchmarks/ops/bench_control_path.py [--config echo.json]

The draft head and the target are stand-ins that answer from tables, and their time is left out,
as is reading logits; everything else is the production code. Medians over ``--repeats`` steps,
one thread. With ``--config`` the file's policy decides under its own cost curve, and the last
columns are that step's time by the curve and the share of it; without, every policy spends 4 nodes
a request.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from vllm_echo.core.accept import accept_given
from vllm_echo.core.commit import needs_commit
from vllm_echo.core.config import EchoConfig, Gate
from vllm_echo.core.cost import CostCurve, Line, StepLoad
from vllm_echo.core.draft import DraftBatch, Frontier
from vllm_echo.core.pipeline import EchoPipeline, Proposal

REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
POLICIES = ("goodput", "echo", "dense", "static", "chain")
STAGES = ("draft, gate, schedule", "pack", "walk", "commit")
CONTEXT = 200
VOCABULARY = 49152
WARM_UP = 20

# Candidates are nearly free, so that budgets are used in full.
FREE = CostCurve(
    step=((1, 20.0), (4096, 21.0)),
    roots=Line(0.0, 0.0),
    layer=Line(0.0, 0.0),
    catch_up=Line(0.0, 0.0),
    control=Line(0.0, 0.0),
)


class Clock:
    """Seconds by name, without those of the stand-ins."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.outside = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.outside, start = 0.0, time.perf_counter()
        yield
        spent = time.perf_counter() - start - self.outside
        self.seconds.setdefault(name, []).append(spent)

    @contextmanager
    def paused(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.outside += time.perf_counter() - start

    def microseconds(self, name: str) -> float:
        return 1e6 * statistics.median(self.seconds[name][WARM_UP:])


class TableHead:
    """``vllm_echo.core.draft.DraftHead``: every node of a request has the same children."""

    def __init__(self, num_requests: int, top_k: int, clock: Clock):
        source = torch.Generator().manual_seed(0)
        self._clock = clock
        self._tokens = torch.stack(
            [torch.randperm(VOCABULARY, generator=source)[:top_k] for _ in range(num_requests)]
        ).to(torch.int32)
        likeliest = torch.rand(num_requests, 1, generator=source)
        shares = 0.3 ** torch.arange(1, top_k + 1)
        self._log_probs = (likeliest * shares / 0.3).clamp(min=1e-4).log()

    def expand_roots(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        with self._clock.paused():
            return self._tokens[:, :width].clone(), self._log_probs[:, :width].clone()

    def expand(self, frontier: Frontier, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        with self._clock.paused():
            shape = (*frontier.tokens.shape, width)
            tokens = self._tokens[frontier.requests, None, :width].expand(shape)
            log_probs = self._log_probs[frontier.requests, None, :width].expand(shape)
            return tokens.contiguous(), log_probs.contiguous()


def measure(config: EchoConfig, num_requests: int, repeats: int) -> tuple[Clock, Proposal | None]:
    """``repeats`` equal steps; their times, and what the last one proposed."""
    clock = Clock()
    pipeline = EchoPipeline(config, num_requests, torch.device("cpu"))
    head = TableHead(num_requests, config.top_k, clock)
    yes = torch.ones(num_requests, dtype=torch.bool)
    most = torch.full((num_requests,), config.num_speculative_tokens, dtype=torch.int32)
    batch = DraftBatch(most, yes, ~yes, most * 0 + 99, ~yes)
    slots = torch.arange(num_requests)
    load = StepLoad(num_requests, 0, num_requests * CONTEXT)
    proposal = None
    for _ in range(WARM_UP + repeats):
        with clock.stage("draft, gate, schedule"):
            offer = pipeline.policy.offer(load)
            if offer.num_nodes:
                proposal = pipeline.propose_trees(head, batch, slots, offer, load)
        tokens = proposal.trees.tokens if proposal else most.new_full((num_requests, 1), -1)
        counts = proposal.trees.num_nodes if proposal else most * 0
        with clock.stage("pack"):
            tree = pipeline.pack_step(slots, tokens, counts)
        # The target agrees with the first child of every row.
        answers = tree.tokens.roll(-1).clamp(min=0).long()
        with clock.stage("walk"):
            paths = accept_given(tree, answers)
        with clock.stage("commit"):
            needs_commit(paths)
    return clock, proposal


def step_ms(curve: CostCurve, requests: int, proposal: Proposal | None) -> float:
    """The whole step by the curve: decoding, drafting, and verifying what was drafted."""
    load = StepLoad(requests, 0, requests * CONTEXT)
    plain = curve.plain_ms(load)
    if proposal is None:
        return plain
    growth, layer = proposal.growth, curve.layer
    drafting = curve.catch_up(requests) + curve.roots(requests)
    drafting += layer.fixed * growth.num_forwards + layer.each * growth.num_expanded
    nodes = curve.nodes_ms(load, int(proposal.trees.num_nodes.sum()))
    return plain + drafting + curve.control.fixed + nodes


def report(
    name: str, config: EchoConfig, requests: int, repeats: int, curve: CostCurve | None
) -> str:
    clock, proposal = measure(config, requests, repeats)
    times = [clock.microseconds(stage) for stage in STAGES]
    layers = 1 + proposal.growth.num_forwards if proposal else 0
    nodes = int(proposal.trees.num_nodes.sum()) if proposal else 0
    cells = [name, requests, layers, nodes, *(f"{t:.0f}" for t in times), f"{sum(times):.0f}"]
    if curve is not None:
        step = step_ms(curve, requests, proposal)
        cells += [f"{step:.1f}", f"{sum(times) / step / 10:.1f} %"]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, help="an echo.json with a profile")
    parser.add_argument("--requests", type=int, nargs="+", default=list(REQUESTS))
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns = [
        "policy",
        "requests",
        "layers",
        "nodes",
        *(f"{stage}, us" for stage in STAGES),
        "sum, us",
    ]
    if args.config:
        columns += ["step, ms", "share"]
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    if args.config:
        config = EchoConfig.from_speculative_config(json.loads(args.config.read_text()))
        if config.profile is None:
            parser.error(f"{args.config} has no profile; `vllm-echo profile` writes one")
        for requests in args.requests:
            print(report(config.policy, config, requests, args.repeats, config.profile))
        return
    base = EchoConfig(
        num_speculative_tokens=8,
        max_depth=6,
        target_depth=4,
        top_k=3,
        gates=(Gate(0, 0.2), Gate(2, 0.1), Gate(4, 0.05)),
        profile=FREE,
    )
    for policy in POLICIES:
        for requests in args.requests:
            config = replace(base, policy=policy, k_max=4 * requests)
            print(report(policy, config, requests, args.repeats, None))


if __name__ == "__main__":
    main()
