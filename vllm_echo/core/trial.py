# SPDX-License-Identifier: Apache-2.0
"""What a few dozen served steps of one load, some of them plain and some with candidates, say of a
cost curve: ``core.watch`` holds such trials."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, median
from typing import Any

from vllm_echo.core.cost import CostCurve, Line, StepLoad

_LEAST_STEPS = 3
"""Of a kind, for a trial to say anything."""
_LEAST_CHOSEN = 6
_LEAST_TOLD = 0.05
"""Share of what candidates add that a curve must tell of, for a factor to correct it."""
_LEAST_RISE, _MOST_RISE = 0.02, 50.0
_LEAST_ERROR = 0.01
_SPIKE = 2.0
# A median's standard error by the median deviation from it, for a normal law.
_MEDIAN_ERROR = 1.25 * 1.48


@dataclass(frozen=True)
class StepTimes:
    """One served step, as the process that ran it saw it."""

    requests: int
    """All of them decode, where the step is ``clean``."""
    context: int
    """Of all requests together."""
    nodes: int
    """Verified."""
    tokens: int
    """Of output."""
    target_ms: float
    """From the end of the step before to its own, without catch-up and drafting."""
    catch_up_ms: float
    draft_ms: float = 0.0
    drafted: int = 0
    """Requests drafted for, at the step's end."""
    layers: int = 0
    expanded: int = 0
    """Draft forwards, and the nodes that they expanded."""
    clean: bool = True
    """No prompt rows, and some request of the step before goes on. By counts alone, which are the
    same on all ranks."""
    kind: str = "plain"
    """What had been asked for: "plain", "probe", or candidates that were "chosen" by the curve."""

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "StepTimes":
        """From what ``StageTimer.end_step`` returns."""
        seconds, counts = record["seconds"], record["counts"]
        catch_up, draft = (1000 * seconds.get(name, 0.0) for name in ("catch_up", "draft"))
        requests, nodes = int(counts["requests"]), int(counts["verified_nodes"])
        drafted = int(counts.get("drafted_requests", 0))
        return cls(
            requests=requests,
            context=int(counts["context_tokens"]),
            nodes=nodes,
            tokens=int(counts["output_tokens"]),
            target_ms=1000 * record["period"] - catch_up - draft,
            catch_up_ms=catch_up,
            draft_ms=draft,
            drafted=drafted,
            layers=int(counts.get("layers", 0)),
            expanded=int(counts.get("frontier_nodes", 0)),
            clean=0 < requests == int(counts["rows"]) - nodes and counts["continuing"] > 0,
        )

    @property
    def load(self) -> StepLoad:
        return StepLoad(self.requests, 0, self.context)


@dataclass(frozen=True)
class Correction:
    """What a curve has to be multiplied with, and what comes on top, at one load. All of it in
    plain steps of that load, which the curve is right about by definition: that a machine is
    slower or faster as a whole changes no decision."""

    rise: float = 1.0
    """Of what rows beyond the requests' own add."""
    node_ms: float = 0.0
    """On top, for each candidate, where the curve tells of no rise that a factor could correct."""
    drafting: float = 1.0
    catch_up: float = 1.0

    def of(self, curve: CostCurve, requests: int) -> CostCurve:
        """``curve``, corrected for loads of about ``requests``."""
        own = curve.step_ms(requests)
        least = own / 10  # of rows below the load's own, which nobody asks for
        step = {rows: max(least, own + self.rise * (ms - own)) for rows, ms in curve.step}
        step[requests] = own
        return replace(
            curve,
            step=tuple(sorted(step.items())),
            roots=_times(curve.roots, self.drafting),
            layer=_times(curve.layer, self.drafting),
            catch_up=_times(curve.catch_up, self.catch_up),
            control=Line(curve.control.fixed, self.rise * curve.control.each + self.node_ms),
            node_context_us=self.rise * curve.node_context_us,
        )

    def departure(self, other: "Correction", trial: "Trial") -> float:
        """By how much of a plain step the two differ about a step like those of ``trial``."""
        nodes = (self.rise - other.rise) * trial.told + (self.node_ms - other.node_ms) * trial.nodes
        drafting = (self.drafting - other.drafting) * trial.drafting_told
        catch_up = (self.catch_up - other.catch_up) * trial.catch_up_told
        return max(map(abs, (nodes, drafting, catch_up))) / trial.plain


@dataclass(frozen=True)
class Trial:
    """The outcome of one; milliseconds are the curve's own."""

    correction: Correction
    error: float
    """Standard error of a step's cost, as a share of a plain step."""
    requests: int
    plain: float
    """A plain step."""
    nodes: float
    """Of the steps that had some, on average."""
    told: float
    """What the curve says that they add."""
    drafting_told: float
    catch_up_told: float
    chosen_time: float | None
    """Time of a step whose candidates the curve chose, in plain steps; None where too few were."""


def evaluate(samples: Iterable[StepTimes], curve: CostCurve) -> Trial | None:
    """Compare ``samples`` of one load with ``curve``; None where they are too few of a kind."""
    steps = list(samples)
    plain = [s for s in steps if s.nodes == 0]
    with_nodes = [s for s in steps if s.nodes > 0]
    if min(len(plain), len(with_nodes)) < _LEAST_STEPS:
        return None
    ratios = [s.target_ms / curve.plain_ms(s.load) for s in plain]
    scale = median(ratios)
    correction, told, residuals = _nodes(with_nodes, curve, scale)
    drafting, drafting_told = _drafting(steps, curve, scale)
    catch_up, catch_up_told, extra_ms = _catch_up(steps, curve, scale)
    plain_ms = fmean(curve.plain_ms(s.load) for s in steps)
    spread_plain = median(abs(r / scale - 1) for r in ratios)
    error = _MEDIAN_ERROR * sqrt(
        spread_plain**2 / len(plain)
        + (median(map(abs, residuals)) / plain_ms) ** 2 / len(residuals)
    )
    return Trial(
        correction=replace(correction, drafting=drafting, catch_up=catch_up),
        error=max(_LEAST_ERROR, error),
        requests=round(fmean(s.requests for s in steps)),
        plain=plain_ms,
        nodes=fmean(s.nodes for s in with_nodes),
        told=told,
        drafting_told=drafting_told,
        catch_up_told=catch_up_told,
        chosen_time=_chosen_time(steps, plain, scale * plain_ms, extra_ms),
    )


def level_of(samples: Iterable[StepTimes], curve: CostCurve) -> float:
    """How long steps take, over what ``curve`` says; above 1 on a machine that is slower."""
    return median(s.target_ms / _target_told(s, curve) for s in samples)


def _target_told(step: StepTimes, curve: CostCurve) -> float:
    plain = curve.plain_ms(step.load)
    if not step.nodes:
        return plain
    return plain + curve.control.fixed + curve.nodes_ms(step.load, step.nodes)


def _nodes(
    steps: Sequence[StepTimes], curve: CostCurve, scale: float
) -> tuple[Correction, float, list[float]]:
    """What candidates add: the correction, what the curve says on average, and what is left."""
    added, told = [], []
    for s in steps:
        fixed = curve.plain_ms(s.load) + curve.control.fixed
        added.append(s.target_ms / scale - fixed)
        rows = curve.step_ms(s.requests + s.nodes) - curve.step_ms(s.requests)
        told.append(rows + curve.per_node_ms(s.load) * s.nodes)
    if fmean(told) > max(0.0, _LEAST_TOLD * fmean(added)):
        pairs = [(a / t, t) for a, t in zip(added, told, strict=True) if t > 0]
        rise = min(_MOST_RISE, max(_LEAST_RISE, _weighted_median(pairs)))
        residuals = [a - rise * t for a, t in zip(added, told, strict=True)]
        return Correction(rise=rise), fmean(told), residuals
    own = [(a - t) / s.nodes for a, t, s in zip(added, told, steps, strict=True)]
    node_ms = _weighted_median([(ms, s.nodes) for ms, s in zip(own, steps, strict=True)])
    residuals = [a - t - node_ms * s.nodes for a, t, s in zip(added, told, steps, strict=True)]
    return Correction(node_ms=node_ms), fmean(told), residuals


def _drafting(steps: Sequence[StepTimes], curve: CostCurve, scale: float) -> tuple[float, float]:
    """The factor of first candidates and layers, and what the curve says of them."""
    pairs = []
    for s in steps:
        if s.drafted:
            layers = curve.layer.fixed * s.layers + curve.layer.each * s.expanded
            pairs.append((s.draft_ms / scale, curve.roots(s.drafted) + layers))
    if not pairs:
        return 1.0, 0.0
    return median(ms / told for ms, told in pairs), fmean(told for _, told in pairs)


def _catch_up(
    steps: Sequence[StepTimes], curve: CostCurve, scale: float
) -> tuple[float, float, float]:
    """The factor of what catch-up takes beyond that of a plain step, what the curve says of it, and
    the milliseconds themselves. Not of a step behind one that drafted nothing: it finds that one's
    rows waiting."""
    drafting = [s for s in steps if s.drafted and s.kind != "plain"]
    plain = [s.catch_up_ms for s in steps if not s.drafted]
    if not drafting or not plain:
        return 1.0, 0.0, 0.0
    extra = max(0.0, median(s.catch_up_ms for s in drafting) - median(plain))
    told = fmean(curve.catch_up(s.drafted) for s in drafting)
    return extra / scale / told, told, extra


def _chosen_time(
    steps: Sequence[StepTimes], plain: Sequence[StepTimes], plain_ms: float, extra_ms: float
) -> float | None:
    chosen = [s for s in steps if s.kind == "chosen"]
    if len(chosen) < _LEAST_CHOSEN:
        return None
    typical = median(s.target_ms for s in chosen)
    target = fmean(min(s.target_ms, _SPIKE * typical) for s in chosen)
    drafts = [s.draft_ms for s in steps if s.drafted]
    drafting = median(drafts) + extra_ms if drafts else 0.0
    # A plain step of its own time: both means are over the same loads.
    return (target + drafting) / plain_ms


def _times(line: Line, factor: float) -> Line:
    return Line(factor * line.fixed, factor * line.each)


def _weighted_median(pairs: Sequence[tuple[float, float]]) -> float:
    """Of (value, weight): what quantile regression through 0 finds for ratios."""
    ordered = sorted(pairs)
    half = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        half -= weight
        if half <= 0:
            return value
    return ordered[-1][0]
