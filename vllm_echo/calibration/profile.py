# SPDX-License-Identifier: Apache-2.0
"""`vllm-echo profile`: the cost curve of a model on a machine, measured through the engine.

Everything is measured as the engine runs it, with scheduling, sampling and the way between
processes: plain steps over batch sizes, steps with fixed trees over budgets, drafting over
depths. Times are medians over the steps of a run; the lines are least squares with
coefficients that cannot be negative.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_echo.cost import CostCurve, Line, StepLoad
from vllm_echo.errors import EchoError

STEPS = 24
"""Decoding steps of one measurement."""
SKIPPED = 4
"""Steps at its beginning that do not count: prefill, and caches that are cold."""
SHORT_CONTEXT = 64
_DIGITS = 4


@dataclass(frozen=True)
class Measurement:
    """Medians over the steps of one run; milliseconds."""

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
    """Upper over lower quartile of the steps' times."""

    @property
    def verify(self) -> float:
        """The step without catch-up and drafting."""
        return self.period - self.catch_up - self.draft


Run = Callable[[int, int, dict[str, Any]], list[dict[str, Any]]]
"""(requests, prompt tokens, echo options) -> the step log of answering them for ``STEPS`` steps."""


def measure(run: Run, requests: int, context: int, options: dict[str, Any]) -> Measurement:
    """One run; only steps of the whole batch count."""
    log = run(requests, context, options)
    steps = [s for s in log if s["counts"].get("requests") == requests][SKIPPED:-1]
    steps = [s for s in steps if s["counts"]["rows"] <= requests + s["counts"]["verified_nodes"]]
    if not steps:
        raise EchoError(
            f"profile: no step held all {requests} requests with {context} tokens each; give the "
            "KV cache more room (VLLM_CPU_KVCACHE_SPACE, in GiB), or lower --max-requests"
        )

    def count(name: str) -> float:
        return statistics.fmean(s["counts"].get(name, 0.0) for s in steps)

    def milliseconds(stage: str) -> float:
        return 1000 * statistics.median(s["seconds"].get(stage, 0.0) for s in steps)

    periods = sorted(s["period"] for s in steps)
    return Measurement(
        requests=requests,
        nodes=count("verified_nodes"),
        layers=count("layers"),
        frontier_nodes=count("frontier_nodes"),
        context=count("context_tokens") / requests,
        period=1000 * statistics.median(s["period"] for s in steps),
        catch_up=milliseconds("catch_up"),
        draft=milliseconds("draft"),
        noise=periods[3 * len(periods) // 4] / periods[len(periods) // 4],
    )


@dataclass
class Measurements:
    """All runs of a profile."""

    plain: list[Measurement]
    long_context: Measurement
    trees: list[Measurement]

    @property
    def noise(self) -> float:
        """Of the typical run."""
        return statistics.median(m.noise for m in [*self.plain, *self.trees])

    def curve(self) -> CostCurve:
        """The cost curve that fits them."""
        plain = sorted(self.plain, key=lambda m: m.requests)
        context_us = self._context_us()
        step = _convex_enough(
            [(m.requests, m.period - context_us / 1000 * m.context * m.requests) for m in plain]
        )
        catch_up = self._catch_up()
        drafting = _least_squares(
            [[1.0, m.requests, m.layers, m.frontier_nodes] for m in self.trees],
            [m.draft for m in self.trees],
        )
        bare = CostCurve(
            step=step,
            roots=Line(*_rounded(drafting[:2])),
            layer=Line(*_rounded(drafting[2:])),
            catch_up=catch_up,
            control=Line(0.0, 0.0),
            context_us=round(context_us, _DIGITS),
        )
        return CostCurve(
            step=step,
            roots=bare.roots,
            layer=bare.layer,
            catch_up=catch_up,
            control=self._control(bare),
            context_us=bare.context_us,
        )

    def _context_us(self) -> float:
        """From the same batch at two context lengths. No more than half of a step over a short
        context is put down to it: what looks like more is noise."""
        long = self.long_context
        short = next(m for m in self.plain if m.requests == long.requests)
        rows = (long.context - short.context) * long.requests
        if rows <= 0:
            return 0.0
        most = min(m.period / (2 * m.context * m.requests) for m in self.plain)
        return 1000 * max(0.0, min(most, (long.period - short.period) / rows))

    def _catch_up(self) -> Line:
        """What a drafting step's catch-up takes beyond that of a plain step."""
        plain = {m.requests: m.catch_up for m in self.plain}
        pairs = [(m.requests, m.catch_up - plain[m.requests]) for m in self.trees]
        return Line(*_rounded(_least_squares([[1.0, r] for r, _ in pairs], [c for _, c in pairs])))

    def _control(self, bare: CostCurve) -> Line:
        """What verification takes beyond a plain step of as many rows; a node can also be
        cheaper than a request's row."""
        plain = {m.requests: m for m in self.plain}
        rows, left = [], []
        for m in self.trees:
            base = plain[m.requests]
            load = StepLoad(m.requests, 0, round(m.context * m.requests))
            predicted = bare.nodes_ms(load, m.nodes)
            rows.append([1.0, m.nodes])
            left.append(m.verify - (base.period - base.catch_up - base.draft) - predicted)
        matrix, target = np.array(rows), np.array(left)
        fixed, each = np.linalg.lstsq(matrix, target, rcond=None)[0]
        if fixed < 0:
            fixed, each = 0.0, np.linalg.lstsq(matrix[:, 1:], target, rcond=None)[0][0]
        return Line(*_rounded([fixed, each]))


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
    shapes = list(_shapes(max_nodes))
    total = len(counts) + 1 + len(tree_counts) * len(shapes)
    done = 0

    def one(requests: int, context: int, options: dict[str, Any]) -> Measurement:
        nonlocal done
        progress(done, total)
        done += 1
        return measure(run, requests, context, options)

    plain = [one(n, SHORT_CONTEXT, {"k_max": 0}) for n in counts]
    long = one(min(4, counts[-1]), long_context, {"k_max": 0})
    trees = [one(n, SHORT_CONTEXT, shape) for n in tree_counts for shape in shapes]
    progress(total, total)
    return Measurements(plain, long, trees)


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


def _least_squares(rows: list[list[float]], values: list[float]) -> list[float]:
    """Coefficients of at least 0: those that come out negative are left out in turn."""
    matrix, target = np.array(rows), np.array(values)
    kept = list(range(matrix.shape[1]))
    while True:
        solution = np.linalg.lstsq(matrix[:, kept], target, rcond=None)[0]
        if not kept or (solution >= 0).all():
            result = np.zeros(matrix.shape[1])
            result[kept] = solution
            return [float(value) for value in result]
        del kept[int(solution.argmin())]


def _convex_enough(points: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """The same points, never falling: noise must not make a row's price negative."""
    result: list[tuple[int, float]] = []
    for rows, ms in points:
        result.append((rows, round(max(ms, result[-1][1] if result else 0.0), _DIGITS)))
    return tuple(result)


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(float(value), _DIGITS) for value in values]
