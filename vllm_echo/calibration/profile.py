# SPDX-License-Identifier: Apache-2.0
"""`vllm-echo profile`: the cost curve of a model on a machine, measured through the engine.

Everything is measured as the engine runs it, with scheduling, sampling and the way between
processes: plain steps over batch sizes, steps with fixed trees over budgets, drafting over
depths. Everything is run twice, and what counts is the fastest quarter of the steps of both runs:
what others do on the machine only ever adds, and comes and goes. The lines are least squares with
coefficients that cannot be negative.
"""

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from vllm_echo.core.cost import CostCurve, Line
from vllm_echo.core.timing import spread
from vllm_echo.errors import EchoError

STEPS = 16
"""Decoding steps of one run, at least."""
SKIPPED = 4
"""Steps at its beginning that do not count: prefill, and caches that are cold."""
SHORT_CONTEXT = 64
LONG_CONTEXT = 512
_CONTEXT_REQUESTS = 16
_LEAST_MS = 1e-3
_DIGITS = 4


@dataclass(frozen=True)
class Measurement:
    """Means over steps of one kind; milliseconds."""

    requests: int
    nodes: float
    """Verified a step."""
    layers: float
    frontier_nodes: float
    context: float
    """Context tokens a request."""
    period: float
    catch_up: float
    draft: float
    noise: float
    """``timing.spread`` of the steps' times."""

    @property
    def verify(self) -> float:
        """The step without catch-up and drafting."""
        return self.period - self.catch_up - self.draft


Run = Callable[[int, int, dict[str, Any]], list[dict[str, Any]]]
"""(requests, prompt tokens, echo options) -> the step log of answering them for ``STEPS`` steps."""


def whole_steps(log: list[dict[str, Any]], requests: int) -> list[dict[str, Any]]:
    """The steps of ``log`` that count: those of the whole batch, without its first and last."""
    steps = [s for s in log if s["counts"].get("requests") == requests][SKIPPED:-1]
    return [s for s in steps if s["counts"]["rows"] <= requests + s["counts"]["verified_nodes"]]


def measure(steps: list[dict[str, Any]], requests: int) -> Measurement:
    """The fastest quarter of ``steps``, which hold ``requests`` requests: everything of the same
    steps, since contexts grow from step to step and their times with them."""
    fastest = sorted(steps, key=lambda s: s["period"])[: 1 + len(steps) // 4]

    def count(name: str) -> float:
        return statistics.fmean(s["counts"].get(name, 0.0) for s in fastest)

    def milliseconds(stage: str) -> float:
        return 1000 * statistics.fmean(s["seconds"].get(stage, 0.0) for s in fastest)

    return Measurement(
        requests=requests,
        nodes=count("verified_nodes"),
        layers=count("layers"),
        frontier_nodes=count("frontier_nodes"),
        context=count("context_tokens") / requests,
        period=1000 * statistics.fmean(s["period"] for s in fastest),
        catch_up=milliseconds("catch_up"),
        draft=milliseconds("draft"),
        noise=spread([s["period"] for s in steps]),
    )


@dataclass
class Measurements:
    """All runs of a profile."""

    plain: list[Measurement]
    trees: list[Measurement]
    long_plain: Measurement
    """As one of ``plain``, over a long context."""
    long_tree: Measurement
    """As the largest of ``trees`` of as many requests, over a long context."""

    @property
    def noise(self) -> float:
        """Of the typical run."""
        return statistics.median(m.noise for m in [*self.plain, *self.trees])

    def curve(self) -> CostCurve:
        """The cost curve that fits them."""
        context_us = self._context_us()
        node_context_us = self._node_context_us(context_us)
        step, control = self._steps(context_us, node_context_us)
        drafting = _least_squares(
            [[1.0, m.requests, m.layers, m.frontier_nodes] for m in self.trees],
            [m.draft for m in self.trees],
        )
        return CostCurve(
            step=step,
            roots=Line(*_rounded(drafting[:2])),
            layer=Line(*_rounded(drafting[2:])),
            catch_up=self._catch_up(),
            control=control,
            context_us=round(context_us, _DIGITS),
            node_context_us=round(node_context_us, _DIGITS),
        )

    def _steps(
        self, context_us: float, node_context_us: float
    ) -> tuple[tuple[tuple[int, float], ...], Line]:
        """The step curve and the control line, from all runs together:

            T = f(rows) + a * requests + b * nodes + (c, where nodes are verified)

        f is linear between powers of two, and nothing is negative. A plain step has one row a
        request, so its curve is f(n) + a * n, and a node differs from a row by b - a: it can also
        be cheaper, as the engine does nothing for it that it does for a request."""
        plain = {m.requests: m for m in self.plain}
        samples = [(m, m.period) for m in self.plain]
        for m in self.trees:
            base = plain[m.requests]
            samples.append((m, m.verify + base.catch_up + base.draft))
        most = max(m.requests + m.nodes for m, _ in samples)
        knots = sorted({*plain, *(n for n in _powers(int(most)) if n > max(plain))})
        matrix, target = [], []
        for m, ms in samples:
            rows = m.requests + m.nodes
            attention = m.context * (context_us * m.requests + node_context_us * m.nodes) / 1000
            matrix.append([*_segments(knots, rows), m.requests, m.nodes, float(m.nodes > 0)])
            target.append(ms - attention)
        # Errors count relative to the step.
        weights = [1 / max(ms, _LEAST_MS) for _, ms in samples]
        *parts, of_request, of_node, fixed = _least_squares(matrix, target, weights)
        step = []
        for rows, ms in zip(knots, np.cumsum(parts), strict=True):
            step.append((rows, round(max(_LEAST_MS, float(ms) + of_request * rows), _DIGITS)))
        return tuple(step), Line(*_rounded([fixed, of_node - of_request]))

    def _context_us(self) -> float:
        """From the same batch at two context lengths. No more than half of a step over a short
        context is put down to it: what looks like more is noise."""
        long = self.long_plain
        short = next(m for m in self.plain if m.requests == long.requests)
        rows = (long.context - short.context) * long.requests
        if rows <= 0:
            return 0.0
        most = min(m.period / (2 * m.context * m.requests) for m in self.plain)
        return 1000 * max(0.0, min(most, (long.period - short.period) / rows))

    def _node_context_us(self, context_us: float) -> float:
        """What is left of the rise of a step with trees once its requests' context is paid; never
        more than a request's own."""
        long = self.long_tree
        short = max((m for m in self.trees if m.requests == long.requests), key=lambda m: m.nodes)
        rise = long.context - short.context
        if rise <= 0 or min(long.nodes, short.nodes) <= 0:
            return context_us
        of_requests = context_us * rise * long.requests / 1000
        rows = long.nodes * long.context - short.nodes * short.context
        each = 1000 * (long.verify - short.verify - of_requests) / max(rows, rise)
        return max(0.0, min(context_us, each))

    def _catch_up(self) -> Line:
        """What a drafting step's catch-up takes beyond that of a plain step."""
        plain = {m.requests: m.catch_up for m in self.plain}
        pairs = [(m.requests, m.catch_up - plain[m.requests]) for m in self.trees]
        return Line(*_rounded(_least_squares([[1.0, r] for r, _ in pairs], [c for _, c in pairs])))


def take_measurements(
    run: Run,
    max_requests: int,
    max_nodes: int,
    long_context: int,
    progress: Callable[[int, int], None],
) -> Measurements:
    """Run everything; ``progress`` hears (runs done, runs in all)."""
    counts = sorted({n for n in _powers(max_requests)} | {max_requests})
    tree_counts = [n for n in counts if n in (1, 2, 4, 8, 16, 32)]
    several = max(n for n in tree_counts if n <= _CONTEXT_REQUESTS)
    shapes = list(_shapes(max_nodes))
    no_nodes: dict[str, Any] = {"k_max": 0}
    # What is compared stands side by side: a machine's speed drifts.
    plan: list[tuple[str, int, int, dict[str, Any]]] = []
    for n in counts:
        plan.append(("plain", n, SHORT_CONTEXT, no_nodes))
        if n == several:
            plan.append(("long plain", n, long_context, no_nodes))
            plan.append(("long tree", n, long_context, shapes[-1]))
        if n in tree_counts:
            plan += [("tree", n, SHORT_CONTEXT, shape) for shape in reversed(shapes)]
    steps: list[list[dict[str, Any]]] = [[] for _ in plan]
    for done in range(2 * len(plan)):
        progress(done, 2 * len(plan))
        index = done % len(plan)
        _, requests, context, options = plan[index]
        found = whole_steps(run(requests, context, options), requests)
        if not found:
            raise EchoError(
                f"profile: no step held all {requests} requests with {context} tokens each; give "
                "the KV cache more room (VLLM_CPU_KVCACHE_SPACE, in GiB), or lower --max-requests"
            )
        steps[index] += found
    progress(2 * len(plan), 2 * len(plan))
    measured: dict[str, list[Measurement]] = {kind: [] for kind, *_ in plan}
    for (kind, requests, _, _), found in zip(plan, steps, strict=True):
        measured[kind].append(measure(found, requests))
    (long_plain,), (long_tree,) = measured["long plain"], measured["long tree"]
    return Measurements(measured["plain"], measured["tree"], long_plain, long_tree)


def _powers(most: int) -> Iterable[int]:
    n = 1
    while n <= most:
        yield n
        n *= 2


def _shapes(max_nodes: int) -> Iterable[dict[str, Any]]:
    """Fixed trees of one, several and many layers."""
    fixed = {"policy": "static", "k_max": 1 << 20, "gates": []}
    for depth, nodes in ((1, 1), (2, 2), (2, 4), (4, 8)):
        if nodes <= max_nodes:
            yield {
                **fixed,
                "max_depth": depth,
                "target_depth": depth,
                "num_speculative_tokens": max(nodes, depth),
            }


def _segments(knots: list[int], rows: float) -> list[float]:
    """What the value at the first knot, and the rise from each knot to the next, contribute at
    ``rows``. Beyond the last knot the last rise goes on."""
    shares = [1.0]
    for low, high in itertools.pairwise(knots):
        share = (rows - low) / (high - low)
        shares.append(max(0.0, share if high == knots[-1] else min(1.0, share)))
    return shares


def _least_squares(
    rows: list[list[float]], values: list[float], weights: list[float] | None = None
) -> list[float]:
    """Coefficients of at least 0."""
    scale = np.array(weights or [1.0] * len(rows))
    solution, _ = nnls(np.array(rows) * scale[:, None], np.array(values) * scale)
    return [float(value) for value in solution]


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(float(value), _DIGITS) for value in values]
