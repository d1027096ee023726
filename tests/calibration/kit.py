# SPDX-License-Identifier: Apache-2.0
"""Draft traces by a law that the test knows, and engines that are not there."""

import random
from collections.abc import Callable, Sequence
from math import exp, inf, log, sin
from typing import Any

import numpy as np

from tests.core.machines import TWO_CORES
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import CostCurve
from vllm_echo.core.policies import make_policy
from vllm_echo.core.trace import DraftTrace
from vllm_echo.core.tree import ROOT

VOCAB = 50_000
Law = Callable[[int, float], float]
"""(depth, q) -> P(accepted), given that the parent was."""


def logit(q: float) -> float:
    return log(q / (1 - q))


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def platt(*curves: tuple[float, float]) -> Law:
    """The law of (intercept, slope) of depth 1, 2, ...; deeper as the last."""

    def law(depth: int, q: float) -> float:
        intercept, slope = curves[min(depth, len(curves)) - 1]
        return sigmoid(intercept + slope * logit(q))

    return law


def never(depth: int, q: float) -> float:
    return 0.0


def always(depth: int, q: float) -> float:
    """The likeliest child, that is."""
    return float(q >= 0.5)


def any_confidence(source: random.Random, depth: int) -> float:
    return source.uniform(0.05, 0.95)


def draft_trace(
    law: Law,
    num_requests: int = 20,
    length: int = 60,
    max_depth: int = 3,
    top_k: int = 2,
    seed: int = 0,
    confidence: Callable[[random.Random, int], float] = any_confidence,
    undrafted: float = 0.0,
    width: int = 1,
) -> DraftTrace:
    """The ``width`` likeliest nodes of a layer are expanded, to ``top_k`` children each.
    ``confidence`` draws the first child's q by depth, its siblings share the rest. ``undrafted`` is
    the share of roots without candidates, and of layers that were not reached."""
    source = random.Random(seed)
    sizes = [top_k * (width if depth > 1 else 1) for depth in range(1, max_depth + 1)]
    depths = [d for d, size in enumerate(sizes, start=1) for _ in range(size)]
    rows = num_requests * length
    truth = [[source.randrange(VOCAB) for _ in range(length)] for _ in range(num_requests)]
    trace = DraftTrace(
        requests=np.repeat(np.arange(num_requests, dtype=np.int32), length),
        positions=np.tile(np.arange(1, length + 1, dtype=np.int32), num_requests),
        context=np.tile(np.arange(11, length + 11, dtype=np.int32), num_requests),
        root_tokens=np.array(truth, dtype=np.int32).reshape(rows),
        tokens=np.zeros((rows, len(depths)), dtype=np.int32),
        parents=np.full((rows, len(depths)), ROOT, dtype=np.int32),
        log_probs=np.full((rows, len(depths)), -inf, dtype=np.float32),
        depths=np.array(depths, dtype=np.int32),
    )
    for row in range(rows):
        said = truth[row // length][row % length + 1 :]
        column = 0
        # (score, column, whether it is what the target says)
        frontier: list[tuple[float, int, bool]] = [(0.0, ROOT, True)]
        for depth, size in enumerate(sizes, start=1):
            if source.random() < undrafted:
                break
            layer = []
            for score, parent, on_path in frontier:
                best = confidence(source, depth)
                qs = [best] + [0.9 * (1 - best) * 0.5**k for k in range(1, top_k)]
                right = _choose(source, [law(depth, q) for q in qs])
                for k, q in enumerate(qs):
                    hit = on_path and k == right and depth <= len(said)
                    trace.tokens[row, column] = said[depth - 1] if hit else VOCAB + k
                    trace.parents[row, column] = parent
                    trace.log_probs[row, column] = log(q)
                    layer.append((score + log(q), column, on_path and k == right))
                    column += 1
            column = sum(sizes[:depth])
            frontier = sorted(layer, key=lambda node: -node[0])[:width]
            assert len(layer) <= size
    return trace


def _choose(source: random.Random, chances: Sequence[float]) -> int | None:
    """Which of a family is accepted: one at most."""
    assert sum(chances) <= 1 + 1e-9, "no law for siblings"
    left = source.random()
    for index, chance in enumerate(chances):
        left -= chance
        if left < 0:
            return index
    return None


CURVE = TWO_CORES
"""A machine that is known."""


class FakeMachine:
    """Answers ``profile.Run`` as a machine with the cost curve ``curve`` would, in step logs of the
    timer's form."""

    def __init__(
        self, curve: CostCurve = CURVE, jitter: float = 0.0, top_k: int = 3, held: int = 1 << 20
    ):
        """``held``: most requests that its KV cache holds."""
        self._curve = curve
        self._jitter = jitter
        self._top_k = top_k
        self._held = held
        self._clock = 0
        self.calls: list[tuple[int, int, dict[str, Any]]] = []

    def __call__(
        self, requests: int, context: int, options: dict[str, Any]
    ) -> list[dict[str, Any]]:
        self.calls.append((requests, context, options))
        held = min(requests, self._held)
        prefill = self._step(held, 0, (), float(context), rows=held * context)
        nodes = options.get("num_speculative_tokens", 0) if options["k_max"] else 0
        widths: tuple[int, ...] = ()
        if nodes:
            config = EchoConfig.from_dict({**options, "top_k": self._top_k, "gates": []})
            widths = make_policy(config).shape.frontier_widths
        steps = [self._step(held, nodes, widths, float(context + i)) for i in range(1, 26)]
        return [prefill, *steps]

    def _step(
        self,
        requests: int,
        nodes: int,
        widths: Sequence[int],
        context: float,
        rows: int | None = None,
    ) -> dict[str, Any]:
        """``nodes`` and ``widths`` of each request."""
        curve, total = self._curve, nodes * requests
        rows = requests + total if rows is None else rows
        always = 0.2 + 0.01 * requests  # the head runs over final rows in plain steps as well
        catch_up = always + (curve.catch_up(requests) if nodes else 0)
        expanded = requests * sum(widths)
        draft = 0.0
        if nodes:
            draft = curve.roots(requests) + curve.layer.fixed * len(widths)
            draft += curve.layer.each * expanded
        period = curve.step_ms(rows) - always + catch_up + draft
        period += context * (curve.context_us * requests + curve.node_context_us * total) / 1000
        if nodes:
            period += curve.control(total)
        self._clock += 1
        noise = 1 + self._jitter * sin(17.0 * self._clock)
        return {
            "period": noise * period / 1000,
            "seconds": {"catch_up": noise * catch_up / 1000, "draft": noise * draft / 1000},
            "counts": {
                "requests": float(requests),
                "rows": float(rows),
                "verified_nodes": float(total),
                "layers": float(len(widths)),
                "frontier_nodes": float(expanded),
                "context_tokens": context * requests,
            },
        }


class FakeEngine:
    """Stands in for ``OfflineEngine``: the head follows a law, the machine a curve."""

    law: Law = staticmethod(platt((-0.3, 0.8)))
    interrupt_at: int | None = None
    """The n-th recording or step log, from 0, is interrupted."""
    jitter = 0.01
    held = 1 << 20
    engines: list["FakeEngine"] = []

    def __init__(
        self,
        model: str,
        draft: str,
        options: dict[str, Any],
        num_speculative_tokens: int,
        engine_args: dict[str, Any],
    ):
        self.arguments = (model, draft, options, num_speculative_tokens, engine_args)
        self.max_model_len = engine_args.get("max_model_len", 2048)
        self.vocab_size = 32_000
        self.recorded: list[list[list[int]]] = []
        self.closed = False
        self._options = options
        self.logged: list[list[list[int]]] = []
        self._machine = FakeMachine(jitter=FakeEngine.jitter, held=FakeEngine.held)
        FakeEngine.engines.append(self)

    def chat_tokens(self, question: str, room: int) -> list[int]:
        return [ord(letter) for letter in question][:room]

    def record(
        self, prompts: Sequence[list[int]], temperature: float, output_tokens: int, seed: int
    ) -> DraftTrace:
        if FakeEngine.interrupt_at == len(self.recorded):
            raise KeyboardInterrupt
        self.recorded.append(list(prompts))
        return draft_trace(
            FakeEngine.law,
            num_requests=len(prompts),
            length=output_tokens,
            max_depth=self._options["max_depth"],
            top_k=self._options["top_k"],
            seed=seed + sum(map(sum, prompts)) + round(1000 * temperature),
        )

    def step_log(
        self, prompts: Sequence[list[int]], options: dict[str, Any], output_tokens: int
    ) -> list[dict[str, Any]]:
        if FakeEngine.interrupt_at == len(self.logged):
            raise KeyboardInterrupt
        self.logged.append(list(prompts))
        return self._machine(len(prompts), len(prompts[0]), options)

    def close(self) -> None:
        self.closed = True
