# SPDX-License-Identifier: Apache-2.0
"""From a draft trace to acceptance models and gates. Pure arithmetic: same trace, same result.

Acceptance: logistic regression of "accepted, given that the parent was" on logit(q), by
depth, with a weak prior towards taking the head at its word (intercept 0, slope 1), so that a
depth with few samples says nothing wild.

Gates (the paper leaves their rule open): thresholds maximise

    (1 + accepted nodes) / (1 + node_cost * nodes + layer_cost * layers drafted)

per request and step, where costs are in units of a request's share of a plain step: expected
tokens over expected time at one load. A gate stands at the root, at the target depth, and at
those few middle depths whose confidence separates (AUC) and which improve the objective. Where
samples are too few to fit a threshold at the root or the target depth, the default one stands.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_echo.core.acceptance import PRICES, AcceptanceModel, SupplyPoint
from vllm_echo.core.config import DEFAULT_ROOT_THRESHOLD, DEFAULT_TARGET_THRESHOLD, Gate
from vllm_echo.core.trace import DraftTrace
from vllm_echo.core.tree import ROOT

MIN_SAMPLES = 50
"""Of each class, below which a depth is not judged."""
MIN_AUC = 0.6
MAX_MIDDLE_GATES = 2
MIN_GAIN = 0.002
"""Relative gain of the objective for which a middle gate is worth having."""
PLATEAU = 0.002
"""Relative difference of the objective that is not told apart."""
_PRIOR_WEIGHT = 4.0
_MIN_SLOPE = 0.01
"""Of an acceptance curve: siblings must keep their order."""
_GRID = tuple(round(0.02 * step, 2) for step in range(0, 49))
_DIGITS = 4


@dataclass(frozen=True)
class GateCosts:
    """What speculation costs at the load that gates are fitted for, in units of a request's
    share of a plain step."""

    node: float = 0.25
    layer: float = 0.05


@dataclass(frozen=True)
class DepthStatistics:
    """How well the confidence of a depth tells accepted from rejected."""

    depth: int
    num_accepted: int
    num_rejected: int
    auc: float | None
    """None where a class has fewer than ``MIN_SAMPLES``."""

    @property
    def problem(self) -> str | None:
        if self.num_accepted == self.num_rejected == 0:
            return "no samples"
        if self.num_accepted == 0:
            return "nothing was accepted"
        if self.num_rejected == 0:
            return "nothing was rejected"
        if self.auc is None:
            return f"too few samples ({self.num_accepted} accepted, {self.num_rejected} rejected)"
        return None


@dataclass(frozen=True)
class Outcome:
    """Expected result of a set of gates, per request and step."""

    objective: float
    accepted: float
    nodes: float
    layers: float


class LayerTable:
    """Per root and depth: the best path's confidence and whether it was accepted."""

    def __init__(self, trace: DraftTrace):
        self._trace = trace
        accepted, known = trace.labels()
        scores = path_scores(trace)
        rows = np.arange(trace.num_roots)
        shape = (trace.num_roots, trace.max_depth)
        self.confidence = np.zeros(shape)
        self.accepted = np.zeros(shape, dtype=bool)
        self.known = np.zeros(shape, dtype=bool)
        for depth in range(1, trace.max_depth + 1):
            columns = np.flatnonzero(trace.depths == depth)
            best = columns[scores[:, columns].argmax(axis=1)]
            drafted = np.isfinite(scores[rows, best])
            self.confidence[:, depth - 1] = np.where(drafted, np.exp(scores[rows, best]), 0.0)
            self.accepted[:, depth - 1] = accepted[rows, best]
            self.known[:, depth - 1] = known[rows, best] & drafted

    def statistics(self) -> list[DepthStatistics]:
        """By depth, from 1."""
        return [self._statistics(depth) for depth in range(1, self.confidence.shape[1] + 1)]

    def samples(self, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """(confidences of accepted, of rejected best paths) at ``depth``."""
        known, hit = self.known[:, depth - 1], self.accepted[:, depth - 1]
        confidence = self.confidence[:, depth - 1]
        return confidence[known & hit], confidence[known & ~hit]

    def _statistics(self, depth: int) -> DepthStatistics:
        accepted, rejected = self.samples(depth)
        enough = min(len(accepted), len(rejected)) >= MIN_SAMPLES
        auc = round(area_under_curve(accepted, rejected), _DIGITS) if enough else None
        return DepthStatistics(depth, len(accepted), len(rejected), auc)

    def outcome(self, gates: Sequence[Gate], costs: GateCosts) -> Outcome:
        """What ``gates`` yield in serving: one node a layer along the best path, and the next
        root where that ends."""
        num_rows, max_depth = self.confidence.shape
        going = self.known[:, 0].copy()
        nodes = np.zeros(num_rows)
        drafted = np.zeros(num_rows)
        reached = np.zeros(num_rows, dtype=np.int64)
        thresholds = {gate.depth: gate.threshold for gate in gates}
        for depth in range(max_depth):
            drafted += going & (self.confidence[:, depth] > 0)
            going = going & (self.confidence[:, depth] > thresholds.get(depth, 0.0))
            nodes += going
            reached[going & self.accepted[:, depth]] = depth + 1
        rows = self._trace.visited(reached)
        rows = rows[self.known[rows, 0]]
        if len(rows) == 0:
            return Outcome(1.0, 0.0, 0.0, 0.0)
        layers = float(np.maximum(drafted[rows] - 1, 0).mean())
        gain, spent = float(reached[rows].mean()), float(nodes[rows].mean())
        cost = 1 + costs.node * spent + costs.layer * layers
        return Outcome((1 + gain) / cost, gain, spent, layers)


def fit_gates(
    table: LayerTable, target_depth: int, costs: GateCosts
) -> tuple[tuple[Gate, ...], list[str]]:
    """Gates by depth, and remarks about depths that could not be judged.

    A head that is never accepted gets one root gate that nothing passes.
    """
    statistics = table.statistics()
    if statistics[0].num_accepted == 0 and statistics[0].num_rejected >= MIN_SAMPLES:
        return (Gate(0, 1.0),), ["the head was never right: the root gate lets nothing pass"]
    max_depth = table.confidence.shape[1]
    remarks = [f"depth {s.depth}: {s.problem}" for s in statistics if s.problem]
    # The gate at depth d judges the layer of depth d + 1.
    usable = [s.depth - 1 for s in statistics if s.auc is not None]
    chosen = sorted({d for d in (0, target_depth) if d < max_depth})
    gates = [Gate(d, DEFAULT_TARGET_THRESHOLD if d else DEFAULT_ROOT_THRESHOLD) for d in chosen]
    for gate in gates:
        if gate.depth not in usable:
            remarks.append(
                f"the gate at depth {gate.depth} keeps the default threshold {gate.threshold}: "
                "collect more prompts to fit it"
            )
    gates = _best_thresholds(table, gates, usable, costs)
    auc = {s.depth - 1: s.auc for s in statistics}
    middle = [
        d for d in usable if d not in chosen and (auc[d] or 0.0) > MIN_AUC and d < target_depth
    ]
    for _ in range(MAX_MIDDLE_GATES):
        before = table.outcome(gates, costs).objective
        options = [
            _best_thresholds(
                table, sorted([*gates, Gate(d, 0.0)], key=lambda g: g.depth), usable, costs
            )
            for d in middle
            if d not in [gate.depth for gate in gates]
        ]
        better = max(options, key=lambda o: table.outcome(o, costs).objective, default=gates)
        if table.outcome(better, costs).objective < before * (1 + MIN_GAIN):
            break
        gates = better
    return tuple(gates), remarks


def _best_thresholds(
    table: LayerTable, gates: list[Gate], usable: Sequence[int], costs: GateCosts
) -> list[Gate]:
    """Coordinate ascent over a grid; thresholds at other depths than ``usable`` stay. Of those
    that are as good as the best one, but for ``PLATEAU``, the middle one is taken: the best itself
    is partly luck of the sample."""
    best = 0.0
    while True:
        for index, gate in enumerate(gates):
            if gate.depth not in usable:
                continue
            trials = [
                [*gates[:index], Gate(gate.depth, threshold), *gates[index + 1 :]]
                for threshold in _GRID
            ]
            objectives = [table.outcome(trial, costs).objective for trial in trials]
            good = [
                trial
                for trial, objective in zip(trials, objectives, strict=True)
                if objective >= (1 - PLATEAU) * max(objectives)
            ]
            gates = good[len(good) // 2]
        objective = table.outcome(gates, costs).objective
        if objective <= best * (1 + PLATEAU):
            return gates
        best = objective


def path_scores(trace: DraftTrace) -> np.ndarray:
    """[P, C] log of the product of draft probabilities; -inf where nothing was drafted."""
    return _path_sums(trace, trace.log_probs.astype(np.float64))


def _path_sums(trace: DraftTrace, values: np.ndarray) -> np.ndarray:
    sums = np.empty(values.shape)
    rows = np.arange(trace.num_roots)
    for column in range(values.shape[1]):
        parent = trace.parents[:, column]
        above = np.where(parent == ROOT, 0.0, sums[rows, np.maximum(parent, 0)])
        sums[:, column] = above + values[:, column]
    return sums


def area_under_curve(accepted: np.ndarray, rejected: np.ndarray) -> float:
    """Chance that an accepted sample has the higher confidence; ties count half."""
    order = np.sort(rejected)
    below = np.searchsorted(order, accepted, side="left")
    equal = np.searchsorted(order, accepted, side="right") - below
    return float((below + 0.5 * equal).sum() / (len(accepted) * len(rejected)))


def fit_acceptance(trace: DraftTrace, max_nodes: int) -> AcceptanceModel:
    """The acceptance model of a trace; ``max_nodes`` caps what a request may offer.

    Raises ValueError when nothing in the trace can be judged.
    """
    curves: list[tuple[float, float]] = []
    for _, log_q, hits in judged_candidates(trace):
        if len(hits) < MIN_SAMPLES:
            if not curves:
                raise ValueError(f"only {len(hits)} candidates could be judged; give more prompts")
            break
        intercept, slope = _logistic(_logit(log_q), hits)
        curves.append((round(intercept, _DIGITS), round(slope, _DIGITS)))
    best_child = _best_children(trace)[: len(curves)]
    model = AcceptanceModel(tuple(curves), tuple(best_child), ())
    supply = _supply(trace, model, max_nodes)
    return AcceptanceModel(model.curves, model.best_child, supply)


def judged_candidates(trace: DraftTrace) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """By depth: (depth, log q, accepted) of the candidates whose parent was accepted."""
    accepted, known = trace.labels()
    for depth in range(1, trace.max_depth + 1):
        columns = np.flatnonzero(trace.depths == depth)
        chosen = _judged(trace, columns, accepted, known)
        yield depth, trace.log_probs[:, columns][chosen], accepted[:, columns][chosen]


def _judged(
    trace: DraftTrace, columns: np.ndarray, accepted: np.ndarray, known: np.ndarray
) -> np.ndarray:
    parents = trace.parents[:, columns]
    above = accepted[np.arange(trace.num_roots)[:, None], np.maximum(parents, 0)]
    return known[:, columns] & ((parents == ROOT) | above)


def _best_children(trace: DraftTrace) -> list[float]:
    """By depth: how often an accepted node's likeliest child is accepted. Only one node of a
    layer can be accepted, so a root's judged candidates of one depth are one family."""
    accepted, known = trace.labels()
    rows = np.arange(trace.num_roots)
    shares = []
    for depth in range(1, trace.max_depth + 1):
        columns = np.flatnonzero(trace.depths == depth)
        chosen = _judged(trace, columns, accepted, known)
        family = chosen.any(axis=1)
        best = np.where(chosen, trace.log_probs[:, columns], -np.inf).argmax(axis=1)
        hits = accepted[rows, columns[best]][family]
        shares.append(round(float(hits.mean()), _DIGITS) if len(hits) else 0.0)
    return shares


def _logit(log_q: np.ndarray) -> np.ndarray:
    log_q = np.minimum(log_q.astype(np.float64), -1e-6)
    return log_q - np.log(-np.expm1(log_q))


def _logistic(x: np.ndarray, hits: np.ndarray) -> tuple[float, float]:
    """(intercept, slope), with a prior of ``_PRIOR_WEIGHT`` at (0, 1); where the slope would fall
    below ``_MIN_SLOPE``, the intercept that is best beside that."""
    y = hits.astype(np.float64)
    ones = np.ones((len(x), 1))
    intercept, slope = _newton(np.column_stack([ones, x]), np.zeros(len(x)), y, np.array([0.0, 1]))
    if slope < _MIN_SLOPE:
        intercept, slope = *_newton(ones, _MIN_SLOPE * x, y, np.zeros(1)), _MIN_SLOPE
    return float(intercept), float(slope)


def _newton(
    features: np.ndarray, offset: np.ndarray, y: np.ndarray, prior: np.ndarray
) -> np.ndarray:
    """Weights of ``features`` that are likeliest with a prior around ``prior``. A step that would
    make things worse is halved: where the head is sure and wrong, whole steps go back and forth
    for ever."""

    def loss(theta: np.ndarray) -> float:
        z = features @ theta + offset
        away = theta - prior
        return float((np.logaddexp(0, z) - y * z).sum() + _PRIOR_WEIGHT / 2 * (away @ away))

    theta = prior.copy()
    before = loss(theta)
    for _ in range(100):
        p = np.exp(-np.logaddexp(0, -(features @ theta + offset)))
        gradient = features.T @ (y - p) - _PRIOR_WEIGHT * (theta - prior)
        hessian = features.T @ (features * (p * (1 - p))[:, None])
        step = np.linalg.solve(hessian + _PRIOR_WEIGHT * np.eye(len(prior)), gradient)
        after = loss(theta + step)
        while after > before and np.abs(step).max() >= 1e-10:
            step = step / 2
            after = loss(theta + step)
        if np.abs(step).max() < 1e-10:
            break
        theta, before = theta + step, after
    return theta


def _supply(trace: DraftTrace, model: AcceptanceModel, max_nodes: int) -> tuple[SupplyPoint, ...]:
    """What a root offers on average at each price and depth, over the roots that serving would
    visit with just these candidates; gains are those that really came true."""
    accepted, known = trace.labels()
    x = _logit(trace.log_probs)
    values = np.empty(x.shape)
    for column, depth in enumerate(trace.depths):
        intercept, slope = model.curve_at(int(depth))
        values[:, column] = -np.logaddexp(0, -(intercept + slope * x[:, column]))
    values[~np.isfinite(trace.log_probs)] = -np.inf
    chance = np.exp(_path_sums(trace, values))
    judged: np.ndarray = known[:, trace.depths == 1].max(axis=1)
    rank = (-chance).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    points = []
    for price, depth in itertools.product(PRICES, range(1, trace.max_depth + 1)):
        taken = (chance > price) & (rank < max_nodes) & (trace.depths <= depth)
        rows = trace.visited((taken & accepted).sum(axis=1))
        rows = rows[judged[rows]]
        taken, right = taken[rows], accepted[rows]
        layers = [
            taken[:, trace.depths == layer].any(axis=1).mean() for layer in range(2, depth + 1)
        ]
        points.append(
            SupplyPoint(
                price=price,
                nodes=round(float(taken.sum(axis=1).mean()), _DIGITS),
                accepted=round(float((taken & right).sum(axis=1).mean()), _DIGITS),
                layers=tuple(round(float(share), _DIGITS) for share in layers),
            )
        )
    return tuple(points)


def calibration_error(trace: DraftTrace, model: AcceptanceModel | None) -> float:
    """Expected calibration error: the mean gap between predicted and true acceptance of judged
    candidates in ten bins of prediction, weighted by their number. Without a model the
    head's own q is the prediction."""
    predicted, hits = [], []
    for depth, log_q, hit in judged_candidates(trace):
        chance = np.exp(log_q.astype(np.float64))
        if model is not None:
            intercept, slope = model.curve_at(depth)
            chance = np.exp(-np.logaddexp(0, -(intercept + slope * _logit(log_q))))
        predicted.append(chance)
        hits.append(hit)
    chance, hit = np.concatenate(predicted), np.concatenate(hits)
    if not len(hit):
        return 0.0
    bins = np.minimum((chance * 10).astype(int), 9)
    gaps = [abs(chance[bins == b].sum() - hit[bins == b].sum()) for b in range(10)]
    return round(float(sum(gaps) / len(hit)), _DIGITS)
