# SPDX-License-Identifier: Apache-2.0
"""Acceptance models from traces whose law is known."""

import copy
import dataclasses
import itertools
import json
import random
from math import isfinite

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.calibration.kit import draft_trace, logit, never, platt, sigmoid
from vllm_echo.calibration import fit
from vllm_echo.core.acceptance import PRICES, AcceptanceModel, Calibration
from vllm_echo.core.trace import DraftTrace

many = settings(max_examples=100, deadline=None, derandomize=True)
MAX_NODES = 8
LAWS = {
    "the head is right about itself": [(0.0, 1.0)],
    "overconfident": [(-1.0, 0.7)],
    "worse with every layer": [(-0.3, 0.9), (-0.6, 0.7), (-1.0, 0.5)],
    "too modest": [(-0.2, 1.4)],
}


def fitted(trace: DraftTrace, max_nodes: int = MAX_NODES) -> AcceptanceModel:
    return fit.fit_acceptance(trace, max_nodes)


def as_json(model: AcceptanceModel) -> str:
    """Written as in echo.json, which has no numbers that are none, and read again."""
    text = json.dumps(Calibration(model, model).to_dict(), allow_nan=False)
    assert Calibration.from_dict(json.loads(text), "echo.calibration").greedy == model
    return text


@pytest.mark.parametrize("curves", LAWS.values(), ids=LAWS)
def test_acceptance_curves_recover_the_law(curves: list[tuple[float, float]]) -> None:
    """Catches curves of one depth at another, candidates that are judged without their parent, and
    the q of a path for that of a node. Tolerance: 0.03 in probability where candidates are; 0.2 in
    the curves' own numbers, which chance may trade for each other."""
    model = fitted(draft_trace(platt(*curves), num_requests=150, length=60, width=2))
    assert len(model.curves) == 3
    for depth, (intercept, slope) in enumerate(model.curves, start=1):
        true_intercept, true_slope = curves[min(depth, len(curves)) - 1]
        assert intercept == pytest.approx(true_intercept, abs=0.2)
        assert slope == pytest.approx(true_slope, abs=0.2)
        for q in (0.05, 0.2, 0.5, 0.8, 0.95):
            predicted = sigmoid(intercept + slope * logit(q))
            assert predicted == pytest.approx(platt(*curves)(depth, q), abs=0.03)


@pytest.mark.parametrize("curves", LAWS.values(), ids=LAWS)
def test_the_best_childs_share_is_that_of_the_law(curves: list[tuple[float, float]]) -> None:
    """Catches a mean over all children, or over children whose parent was wrong."""
    model = fitted(draft_trace(platt(*curves), num_requests=150, length=60))
    source = random.Random(0)
    qs = [source.uniform(0.05, 0.95) for _ in range(5000)]
    qs = [max(q, 0.45 * (1 - q)) for q in qs]  # the drawn child, or its sibling
    for depth, share in enumerate(model.best_child, start=1):
        expected = sum(platt(*curves)(depth, q) for q in qs) / len(qs)
        assert share == pytest.approx(expected, abs=0.04)


@many
@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=30),
    st.lists(st.integers(0, 8), min_size=1, max_size=30),
)
def test_auc_is_the_share_of_pairs_in_order(accepted: list[int], rejected: list[int]) -> None:
    """Catches ties that count in full or not at all, and classes the wrong way round."""
    pairs = [(a > r) + 0.5 * (a == r) for a in accepted for r in rejected]
    area = fit.area_under_curve(np.array(accepted) / 8, np.array(rejected) / 8)
    assert area == pytest.approx(sum(pairs) / len(pairs))


def test_auc_of_the_extremes() -> None:
    low, high = np.array([0.1, 0.2]), np.array([0.3, 0.9])
    assert fit.area_under_curve(high, low) == 1.0
    assert fit.area_under_curve(low, high) == 0.0
    assert fit.area_under_curve(low, low) == 0.5


def loss(curve: tuple[float, float], x: np.ndarray, hits: np.ndarray) -> float:
    """What the fit minimises: log likelihood, and the prior's weight at (0, 1)."""
    z = curve[0] + curve[1] * x
    likelihood = sum(np.logaddexp(0, z) - hits * z)
    return float(likelihood + 2.0 * (curve[0] ** 2 + (curve[1] - 1) ** 2))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_no_curve_nearby_is_likelier(seed: int) -> None:
    """Catches a fit that stops too early or never settles, over heads that are right, wrong, sure
    and unsure, and a slope that is cut off without its intercept."""
    source = np.random.default_rng(seed)
    x = source.normal(source.uniform(-8, 8), source.choice([0.1, 1, 5]), source.integers(1, 400))
    slope, intercept = source.uniform(-2, 2), source.uniform(-6, 6)
    hits = source.random(len(x)) < 1 / (1 + np.exp(-(intercept + slope * x)))
    found = fit._logistic(x, hits)
    assert found[1] >= fit._MIN_SLOPE
    best = loss(found, x, hits)
    for da, db in [(1e-3, 0), (-1e-3, 0), (0, 1e-3), (0, -1e-3), (0.5, 0), (0, 0.5), (-0.5, 0)]:
        nearby = found[0] + da, found[1] + db
        if nearby[1] >= fit._MIN_SLOPE:
            assert loss(nearby, x, hits) >= best - 1e-9


def test_a_head_that_is_sure_and_always_wrong_is_believed_nothing() -> None:
    """Catches Newton's method going back and forth for ever: at 99.9 % each whole step overshoots
    into the other extreme."""
    trace = draft_trace(never, num_requests=100, confidence=lambda source, depth: 0.999)
    model = fitted(trace)
    intercept, slope = model.curves[0]
    assert sigmoid(intercept + slope * logit(0.999)) < 0.01
    assert fit.calibration_error(trace, model) < 0.01 < 0.4 < fit.calibration_error(trace, None)


def test_confidence_that_is_worth_nothing_leaves_the_mean() -> None:
    """Catches the intercept of a falling curve beside the slope that had to be raised: the mean
    would be far off."""
    law = platt((-0.5, -0.6))
    trace = draft_trace(law, top_k=1, num_requests=60, confidence=lambda s, d: s.uniform(0.1, 0.4))
    model = fitted(trace)
    depth, log_q, hits = next(iter(fit.judged_candidates(trace)))
    intercept, slope = model.curves[0]
    assert depth == 1
    assert slope == fit._MIN_SLOPE
    predicted = [sigmoid(intercept + slope * logit(q)) for q in np.exp(log_q).tolist()]
    assert sum(predicted) / len(predicted) == pytest.approx(hits.mean(), abs=0.01)


def test_a_depth_with_few_samples_says_nothing_of_its_own() -> None:
    """Deeper nodes use the last curve that could be fitted; one of 20 samples would be noise."""
    trace = draft_trace(platt((-2.0, 0.5), (-3.0, 0.5)), num_requests=20, length=20, max_depth=4)
    judged = [len(hits) for _, _, hits in fit.judged_candidates(trace)]
    model = fitted(trace)
    enough = [count >= fit.MIN_SAMPLES for count in judged]
    assert enough == sorted(enough, reverse=True)
    assert 0 < len(model.curves) == len(model.best_child) == sum(enough) < 4
    assert model.curve_at(4) == model.curves[-1]


def test_the_prior_speaks_for_few_samples() -> None:
    """With next to no data the head is taken at its word."""
    intercept, slope = fit._logistic(np.zeros(2), np.array([True, False]))
    assert intercept == pytest.approx(0, abs=1e-9)
    assert slope == pytest.approx(1)


@pytest.mark.parametrize("curves", LAWS.values(), ids=LAWS)
def test_supply_falls_as_the_price_rises(curves: list[tuple[float, float]]) -> None:
    """Catches prices in the wrong order, and gains that are counted without their nodes. Roots
    that serving visits differ from price to price, so by chance a point may lie a little higher
    than the one before it: 2 % of the nodes."""
    model = fitted(draft_trace(platt(*curves), num_requests=100))
    for depth in (1, 2, 3):
        points = [point for point in model.supply if point.depth == depth]
        assert [point.price for point in points] == list(PRICES)
        for cheap, dear in itertools.pairwise(points):
            assert dear.nodes <= cheap.nodes * 1.02 + 0.005
            assert dear.accepted <= cheap.accepted * 1.02 + 0.005
        assert points[0].accepted > 3 * points[-1].accepted
    for point in model.supply:
        assert 0 <= point.accepted <= point.nodes <= MAX_NODES
        assert all(0 <= share <= 1 for share in point.layers)
        assert list(point.layers) == sorted(point.layers, reverse=True), "layers end, never begin"


def test_deeper_supply_is_more() -> None:
    """By the roots that are visited, 2 % more or less. Catches a depth that is counted from 0."""
    model = fitted(draft_trace(platt((0.0, 1.0)), num_requests=100))
    for shallow, deep in itertools.pairwise(model.supply):
        if shallow.price == deep.price:
            assert deep.depth == shallow.depth + 1
            assert deep.nodes >= shallow.nodes * 0.98 - 0.005
            assert deep.accepted >= shallow.accepted * 0.98 - 0.005
    assert model.supply[0].nodes == 2, "one layer of two, each worth half a percent"


def test_what_is_offered_at_a_price_is_worth_it() -> None:
    """Nodes of more than half a chance come true more than half the time; all of them less often.
    Catches path scores for those of nodes, and labels of the wrong candidate."""
    supply = fitted(draft_trace(platt((-0.3, 0.9)), num_requests=200)).supply
    for point in supply:
        if point.nodes > 0.2:
            assert point.accepted / point.nodes > point.price
    assert max(supply, key=lambda point: point.nodes).accepted < 0.5 * MAX_NODES


def test_supply_keeps_to_a_requests_most_nodes() -> None:
    trace = draft_trace(platt((0.0, 1.0)), num_requests=50, max_depth=4, top_k=3)
    few, many_nodes = fitted(trace, 2).supply, fitted(trace, 12).supply
    assert max(point.nodes for point in few) <= 2 < max(point.nodes for point in many_nodes)
    assert few[-1] == many_nodes[-1], "at the highest price nobody has more than two"


def test_supply_is_the_obvious_count_over_visited_roots() -> None:
    """Catches averages over all positions, which overstate it, and ends of outputs that count as
    refusals."""
    trace = draft_trace(platt((-0.3, 0.9)), num_requests=12, length=25, undrafted=0.1, width=2)
    model = fitted(trace, 4)
    accepted, known = trace.labels()
    for point in model.supply[::7]:
        nodes, right, roots, row = 0, 0, 0, 0
        while row < trace.num_roots:
            chances: list[float] = []
            for column in range(trace.tokens.shape[1]):
                parent, log_q = int(trace.parents[row, column]), trace.log_probs[row, column]
                above = 1.0 if parent < 0 else chances[parent]
                intercept, slope = model.curve_at(int(trace.depths[column]))
                own = 0.0
                if np.isfinite(log_q):
                    own = sigmoid(intercept + slope * logit(float(np.exp(np.float64(log_q)))))
                chances.append(above * own)
            order = sorted(range(len(chances)), key=lambda c: -chances[c])[:4]
            order = [c for c in order if trace.depths[c] <= point.depth]
            taken = [c for c in order if chances[c] > point.price]
            hits = sum(bool(accepted[row, c]) for c in taken)
            if known[row, 0]:
                nodes, right, roots = nodes + len(taken), right + hits, roots + 1
            here = trace.requests[row]
            row += 1 + hits
            # The next request begins with its first root.
            if row >= trace.num_roots or trace.requests[row] != here:
                later = np.flatnonzero(trace.requests > here)
                row = int(later[0]) if len(later) else trace.num_roots
        assert point.nodes == pytest.approx(nodes / roots, abs=1e-3)
        assert point.accepted == pytest.approx(right / roots, abs=1e-3)


def test_roots_that_nothing_was_drafted_for_do_not_thin_the_supply() -> None:
    """An output's last token is a root that serving does not draft from either."""
    trace = draft_trace(platt((-0.3, 0.9)), num_requests=40)
    closed = copy.deepcopy(trace)
    last = closed.positions == 60
    closed.log_probs[last] = -np.inf
    assert fitted(closed) == fitted(trace)


@pytest.mark.parametrize("curves", LAWS.values(), ids=LAWS)
def test_calibration_helps_on_requests_that_it_has_not_seen(
    curves: list[tuple[float, float]],
) -> None:
    """The error falls where the head errs, and stays (within 0.01) where it does not."""
    law = platt(*curves)
    model = fitted(draft_trace(law, num_requests=100, seed=1))
    unseen = draft_trace(law, num_requests=100, seed=2)
    before, after = fit.calibration_error(unseen, None), fit.calibration_error(unseen, model)
    assert after <= before + 0.01
    assert after < 0.03
    if curves[0][0] <= -1:
        assert after < before / 3


def test_calibration_error_is_the_obvious_binning() -> None:
    trace = draft_trace(platt((-1.0, 0.7)), num_requests=10)
    bins: dict[int, list[tuple[float, bool]]] = {}
    for _, log_q, hits in fit.judged_candidates(trace):
        for q, hit in zip(np.exp(log_q.astype(np.float64)).tolist(), hits.tolist(), strict=True):
            bins.setdefault(int(q * 10), []).append((q, hit))
    count = sum(map(len, bins.values()))
    gap = sum(abs(sum(q - hit for q, hit in pairs)) for pairs in bins.values()) / count
    assert fit.calibration_error(trace, None) == pytest.approx(gap, abs=1e-4)


def test_the_fit_is_a_function_of_its_trace() -> None:
    """Catches random starts, and arrays that are written to."""
    trace = draft_trace(platt((-0.3, 0.9)), num_requests=30, undrafted=0.1)
    untouched = copy.deepcopy(trace)
    first = fitted(trace)
    assert fitted(trace) == first == fitted(untouched)
    for field in dataclasses.fields(DraftTrace):
        assert np.array_equal(getattr(trace, field.name), getattr(untouched, field.name))


@pytest.mark.parametrize("requests", [(1, 200), (30, 40)])
@pytest.mark.parametrize("law", [never, platt((5.0, 0.5)), platt((0.0, 1.0))])
def test_models_of_odd_traces_are_numbers(law: object, requests: tuple[int, int]) -> None:
    """A head that is never or always right, in one request or many: finite, and fit for JSON."""
    count, length = requests
    trace = draft_trace(law, count, length, top_k=1)  # type: ignore[arg-type]
    text = as_json(fitted(trace))
    assert "NaN" not in text
    assert "Infinity" not in text
    assert isfinite(fit.calibration_error(trace, fitted(trace)))


def test_extreme_probabilities_stay_finite(recwarn: pytest.WarningsRecorder) -> None:
    """A q of 1 in floats, and one of e**-2000. Catches overflow, which says nothing but warns."""
    trace = draft_trace(platt((0.0, 1.0)), num_requests=10)
    trace.log_probs[::2, 0] = 0.0
    trace.log_probs[::2, 1] = -2000.0
    as_json(fitted(trace))
    assert isfinite(fit.calibration_error(trace, fitted(trace)))
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


@pytest.mark.parametrize("length", [0, 1, 5])
def test_too_few_samples_are_said_plainly(length: int) -> None:
    trace = draft_trace(platt((0.0, 1.0)), num_requests=2, length=length)
    with pytest.raises(ValueError, match=r"^only \d+ candidates could be judged; give more"):
        fitted(trace)
    assert fit.calibration_error(trace, None) >= 0
