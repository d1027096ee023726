# SPDX-License-Identifier: Apache-2.0
"""Gates from traces: where they stand, what they ask, and what is said when nothing can be told."""

import copy
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.calibration.kit import Law, draft_trace, never, platt
from vllm_echo.calibration import fit
from vllm_echo.calibration.calibrate_command import gate_costs, split_requests
from vllm_echo.calibration.fit import GateCosts, LayerTable, Outcome
from vllm_echo.calibration.report import CalibrationReport, plot_confidences
from vllm_echo.core.config import DEFAULT_ROOT_THRESHOLD, DEFAULT_TARGET_THRESHOLD, EchoConfig, Gate
from vllm_echo.core.cost import CostCurve, Line
from vllm_echo.core.trace import DraftTrace
from vllm_echo.core.tree import ROOT

COSTS = GateCosts()
DEAR = GateCosts(node=0.3, layer=0.3)
TARGET = 4


def best_path(trace: DraftTrace, row: int, depth: int) -> tuple[float, int | None]:
    """(its probability, its end's column) of the likeliest path to ``depth``."""
    found: tuple[float, int | None] = (0.0, None)
    for column in np.flatnonzero(trace.depths == depth).tolist():
        score, node = 0.0, column
        while node != ROOT:
            score += float(trace.log_probs[row, node])
            node = int(trace.parents[row, node])
        if np.exp(score) > found[0]:
            found = float(np.exp(score)), column
    return found


def obvious_outcome(trace: DraftTrace, gates: Sequence[Gate], costs: GateCosts) -> Outcome:
    """Serving, request by request: draft a layer, ask the gate, keep the best node, go on where
    the accepted path ends."""
    accepted, known = trace.labels()
    thresholds = {gate.depth: gate.threshold for gate in gates}
    steps: list[tuple[int, int, int]] = []
    for request in np.unique(trace.requests):
        rows = np.flatnonzero(trace.requests == request).tolist()
        place = 0
        while place < len(rows):
            row = rows[place]
            nodes, layers, reached = 0, 0, 0
            end = best_path(trace, row, 1)[1]
            counts = end is not None and bool(known[row, end])
            for depth in range(1, trace.max_depth + 1) if counts else ():
                confidence, end = best_path(trace, row, depth)
                if end is None:
                    break
                layers += 1
                if confidence <= thresholds.get(depth - 1, 0.0):
                    break
                nodes += 1
                if accepted[row, end]:
                    reached = depth
            if counts:
                steps.append((reached, nodes, max(0, layers - 1)))
            place += 1 + reached
    if not steps:
        return Outcome(1.0, 0.0, 0.0, 0.0)
    gain, spent, layers_drafted = (sum(step[i] for step in steps) / len(steps) for i in range(3))
    cost = 1 + costs.node * spent + costs.layer * layers_drafted
    return Outcome((1 + gain) / cost, gain, spent, layers_drafted)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_an_outcome_is_what_serving_would_do(seed: int) -> None:
    """Catches gates that ask the layer before or after theirs, roots that serving never visits, and
    nodes of requests that were truncated."""
    source = random.Random(seed)
    trace = draft_trace(
        platt((source.uniform(-1, 0), 1.0)),
        num_requests=source.randint(1, 4),
        length=source.randint(1, 15),
        max_depth=source.randint(1, 4),
        seed=seed,
        undrafted=source.choice([0.0, 0.2]),
        width=source.choice([1, 2]),
    )
    gates = [Gate(d, source.random() ** 2) for d in range(6) if source.random() < 0.5]
    costs = GateCosts(source.random(), source.random())
    found = LayerTable(trace).outcome(gates, costs)
    expected = obvious_outcome(trace, gates, costs)
    assert asdict(found) == pytest.approx(asdict(expected))


def test_statistics_count_the_best_paths_that_could_be_judged() -> None:
    trace = draft_trace(platt((0.0, 1.0)), num_requests=30, length=20, undrafted=0.1, width=2)
    accepted, known = trace.labels()
    for s in LayerTable(trace).statistics():
        ends = [best_path(trace, row, s.depth) for row in range(trace.num_roots)]
        judged = [
            (confidence, bool(accepted[row, end]))
            for row, (confidence, end) in enumerate(ends)
            if end is not None and known[row, end]
        ]
        yes = [confidence for confidence, hit in judged if hit]
        no = [confidence for confidence, hit in judged if not hit]
        assert (s.num_accepted, s.num_rejected) == (len(yes), len(no))
        if s.auc is not None:
            pairs = [(a > r) + 0.5 * (a == r) for a in yes for r in no]
            assert s.auc == pytest.approx(sum(pairs) / len(pairs), abs=1e-4)
        assert (s.auc is None) == (min(len(yes), len(no)) < fit.MIN_SAMPLES)
        assert (s.problem is None) == (s.auc is not None)


def sure_or_lost(source: random.Random, depth: int) -> float:
    return source.choice([source.uniform(0.05, 0.25), source.uniform(0.9, 0.99)])


def if_sure(depth: int, q: float) -> float:
    return float(q >= 0.9)


def test_thresholds_lie_between_classes_that_confidence_separates() -> None:
    """Catches thresholds at the edge of the sample, and gates that look at the wrong layer."""
    trace = draft_trace(if_sure, 60, 60, max_depth=3, top_k=1, confidence=sure_or_lost)
    table = LayerTable(trace)
    gates, remarks = fit.fit_gates(table, 2, DEAR)
    assert remarks == []
    assert {0, 2} <= {gate.depth for gate in gates}
    for gate in gates:
        accepted, rejected = table.samples(gate.depth + 1)
        assert rejected.max() <= gate.threshold < accepted.min()
    outcome = table.outcome(gates, DEAR)
    assert outcome.objective > table.outcome((), DEAR).objective
    assert outcome.accepted > 0.8


def falling(source: random.Random, depth: int) -> float:
    """Sure at first, then less and less."""
    return min(0.99, max(0.02, source.uniform(0.75, 1.0) - 0.12 * depth * source.random()))


Q_ITSELF = platt((0.0, 1.0))


def gates_of(
    trace: DraftTrace, costs: GateCosts, target_depth: int = TARGET
) -> tuple[LayerTable, list[Gate], float]:
    """(table, gates, objective of what root and target gates alone come to)."""
    table = LayerTable(trace)
    gates, _ = fit.fit_gates(table, target_depth, costs)
    ends = [Gate(depth, 0.0) for depth in (0, target_depth)]
    plain = fit._best_thresholds(table, ends, [0, target_depth], costs)
    return table, list(gates), table.outcome(plain, costs).objective


@pytest.mark.parametrize("costs", [COSTS, DEAR, GateCosts(0.1, 0.5), GateCosts(0.02, 0.02)])
@pytest.mark.parametrize("target_depth", [2, 4])
def test_root_and_target_always_have_a_gate(costs: GateCosts, target_depth: int) -> None:
    trace = draft_trace(Q_ITSELF, 60, 40, max_depth=5, top_k=1, confidence=falling)
    _, gates, _ = gates_of(trace, costs, target_depth)
    depths = [gate.depth for gate in gates]
    assert depths == sorted(set(depths))
    assert depths[0] == 0
    assert depths[-1] == target_depth


def hinting(
    at: Sequence[int], lost: float = 0.5
) -> tuple[Law, Callable[[random.Random, int], float]]:
    """A share ``lost`` of the paths ends at each of the depths ``at``, and the head knows it."""

    def confidence(source: random.Random, depth: int) -> float:
        if depth in at and source.random() < lost:
            return source.uniform(0.05, 0.1)
        return source.uniform(0.95, 0.99)

    return (lambda depth, q: 0.97 if q > 0.5 else 0.02), confidence


def test_a_middle_gate_stands_where_confidence_tells() -> None:
    """The layer that decides is that of depth 2: the gate at depth 1 sees it."""
    law, confidence = hinting([2])
    trace = draft_trace(law, 60, 50, max_depth=6, top_k=1, confidence=confidence)
    table, gates, without = gates_of(trace, DEAR, 5)
    assert [gate.depth for gate in gates] == [0, 1, 5]
    assert table.outcome(gates, DEAR).objective >= without * (1 + fit.MIN_GAIN)
    assert 0.1 < gates[1].threshold < 0.9


def test_no_more_middle_gates_than_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer decides for some, and a gate before each would help a little."""
    law, confidence = hinting(range(1, 8), lost=0.2)
    trace = draft_trace(law, 80, 60, max_depth=7, top_k=1, confidence=confidence)
    dear_layers = GateCosts(0.02, 0.6)
    table, gates, without = gates_of(trace, dear_layers, 6)
    assert len(gates) == 2 + fit.MAX_MIDDLE_GATES
    gain = table.outcome(gates, dear_layers).objective / without
    assert gain >= (1 + fit.MIN_GAIN) ** fit.MAX_MIDDLE_GATES
    monkeypatch.setattr(fit, "MAX_MIDDLE_GATES", 5)
    assert len(gates_of(trace, dear_layers, 6)[1]) > len(gates), "there was more to be had"


def test_middle_gates_cost_something_or_are_not_there() -> None:
    """Confidence tells well, but where speculation is free nothing is worth asking."""
    law, confidence = hinting([2])
    trace = draft_trace(law, 60, 50, max_depth=6, top_k=1, confidence=confidence)
    free = GateCosts(0.0, 0.0)
    table, gates, _ = gates_of(trace, free, 5)
    assert (table.statistics()[1].auc or 0) > 0.9
    assert [gate.depth for gate in gates] == [0, 5]
    assert table.outcome(gates, free).objective >= 0.99 * table.outcome((), free).objective


def test_a_middle_depth_that_tells_nothing_gets_no_gate() -> None:
    """Whatever it would gain: a gate on chance is luck of the sample. The AUC decides."""
    law: Law = lambda depth, q: 0.6 if depth == 2 else 0.9  # noqa: E731
    trace = draft_trace(
        law, 30, 30, max_depth=3, top_k=1, confidence=lambda s, d: s.uniform(0.5, 0.6)
    )
    table, gates, _ = gates_of(trace, DEAR, 2)
    for gate in gates[1:-1]:
        assert (table.statistics()[gate.depth].auc or 0) > fit.MIN_AUC
    assert (table.statistics()[1].auc or 0) < fit.MIN_AUC
    assert 1 not in [gate.depth for gate in gates]


def test_gates_pay_on_requests_that_they_have_not_seen() -> None:
    """Against the defaults and none, where speculation is dear."""
    traces = [
        draft_trace(Q_ITSELF, 60, 60, max_depth=5, confidence=falling, seed=s) for s in (1, 2)
    ]
    seen, unseen = map(LayerTable, traces)
    gates, _ = fit.fit_gates(seen, TARGET, DEAR)
    objective = unseen.outcome(gates, DEAR).objective
    defaults = (Gate(0, DEFAULT_ROOT_THRESHOLD), Gate(TARGET, DEFAULT_TARGET_THRESHOLD))
    assert objective > unseen.outcome(defaults, DEAR).objective
    assert objective > unseen.outcome((), DEAR).objective


def test_dearer_speculation_closes_the_root() -> None:
    table = LayerTable(draft_trace(Q_ITSELF, 60, 60))
    thresholds = [
        fit.fit_gates(table, 2, GateCosts(node, node))[0][0].threshold for node in (0.1, 0.4, 0.8)
    ]
    assert thresholds == sorted(set(thresholds))


def test_gates_are_a_function_of_the_trace() -> None:
    trace = draft_trace(Q_ITSELF, 40, 40, max_depth=5, confidence=falling)
    untouched = copy.deepcopy(trace)
    first = fit.fit_gates(LayerTable(trace), TARGET, DEAR)
    assert fit.fit_gates(LayerTable(trace), TARGET, DEAR) == first
    assert fit.fit_gates(LayerTable(untouched), TARGET, DEAR) == first


ODD: dict[str, tuple[DraftTrace, str]] = {
    "never accepted": (
        draft_trace(never, 20, 40, max_depth=5),
        "the head was never right: the root gate lets nothing pass",
    ),
    "always accepted": (
        draft_trace(lambda d, q: 1.0, 20, 40, max_depth=5, top_k=1),
        "depth 1: nothing was rejected",
    ),
    "nothing accepted at the target's layer": (
        draft_trace(lambda d, q: 0.9 * q if d < 5 else 0.0, 30, 60, max_depth=5, top_k=1),
        "depth 5: nothing was accepted",
    ),
    "few": (draft_trace(Q_ITSELF, 5, 10, max_depth=5), "depth 1: too few samples ("),
    "few, and none accepted": (draft_trace(never, 2, 10, max_depth=5), "depth 1: nothing was acc"),
    "a single request": (draft_trace(Q_ITSELF, 1, 30, max_depth=5), "depth 5: "),
    "a single root": (draft_trace(Q_ITSELF, 1, 1, max_depth=5), "depth 1: no samples"),
    "nothing drafted": (
        draft_trace(Q_ITSELF, 5, 10, max_depth=5, undrafted=1.0),
        "depth 1: no samples",
    ),
    "no roots": (draft_trace(Q_ITSELF, 3, 0, max_depth=5), "depth 1: no samples"),
}


@pytest.mark.parametrize(("trace", "remark"), ODD.values(), ids=ODD)
def test_odd_traces_give_gates_that_can_be_served_and_a_plain_remark(
    trace: DraftTrace, remark: str, tmp_path: Path
) -> None:
    """Catches means of nothing, gates that vanish with their samples, and a head that is called
    hopeless because nobody looked."""
    table = LayerTable(trace)
    gates, remarks = fit.fit_gates(table, TARGET, COSTS)
    assert any(text.startswith(remark) for text in remarks), remarks
    values = [asdict(gate) for gate in gates]
    EchoConfig.from_speculative_config(
        {"method": "echo", "model": "head", "echo": {"gates": values}}
    )
    json.dumps(values, allow_nan=False)
    for rule in (gates, ()):
        assert all(map(isfinite, asdict(table.outcome(rule, COSTS)).values()))
    assert gates[0].depth == 0
    if remark.startswith("the head"):
        assert gates == (Gate(0, 1.0),)
    else:
        assert gates[-1].depth == TARGET
        assert gates[0].threshold < 1
    report = report_of(table, gates, remarks)
    assert "nan" not in report.markdown()
    plot_confidences(tmp_path / "odd.png", "odd", table, gates, [s.auc for s in report.statistics])
    assert (tmp_path / "odd.png").stat().st_size > 1000


def test_a_gate_without_samples_keeps_its_default_and_says_so() -> None:
    """Catches thresholds that are fitted to a handful of tokens."""
    trace, _ = ODD["few"]
    gates, remarks = fit.fit_gates(LayerTable(trace), TARGET, COSTS)
    assert gates == (Gate(0, DEFAULT_ROOT_THRESHOLD), Gate(TARGET, DEFAULT_TARGET_THRESHOLD))
    assert (
        f"the gate at depth {TARGET} keeps the default threshold {DEFAULT_TARGET_THRESHOLD}: "
        "collect more prompts to fit it"
    ) in remarks


def test_a_target_beyond_what_was_drafted_has_no_gate() -> None:
    """A gate at the deepest layer decides nothing."""
    table = LayerTable(draft_trace(Q_ITSELF, 40, 40, max_depth=2))
    for target_depth in (2, 3):
        gates, _ = fit.fit_gates(table, target_depth, COSTS)
        assert gates[0].depth == 0
        assert gates[-1].depth < 2


def report_of(
    table: LayerTable, gates: Sequence[Gate], remarks: Sequence[str]
) -> CalibrationReport:
    return CalibrationReport(
        title="Calibration of a head",
        statistics=table.statistics(),
        gates=gates,
        remarks=remarks,
        costs=COSTS,
        fitted={"fitted gates": table.outcome(gates, COSTS)},
        held_out={"fitted gates": table.outcome(gates, COSTS)},
        calibration_error={"greedy": (0.1, 0.01)},
    )


def test_the_report_has_every_depth_its_gate_and_what_is_wrong() -> None:
    """A gate stands in the row of the layer that it judges."""
    trace = draft_trace(Q_ITSELF, 25, 25, max_depth=6)
    table = LayerTable(trace)
    gates = (Gate(0, 0.25), Gate(2, 0.5))
    lines = report_of(table, gates, ["a remark"]).markdown().splitlines()
    for s in table.statistics():
        row = next(line for line in lines if line.startswith(f"| {s.depth} |"))
        assert f"| {s.num_accepted} | {s.num_rejected} |" in row
        assert (f"{s.auc:.3f}" if s.auc is not None else str(s.problem)) in row
        assert ("c > 0.25" in row) == (s.depth == 1)
        assert ("c > 0.50" in row) == (s.depth == 3)
    assert "- a remark" in lines
    assert any("too few samples" in line for line in lines)


def test_costs_follow_the_profile() -> None:
    """In units of a request's share of a plain step of four, at the trace's mean context."""
    curve = CostCurve(
        step=((1, 10.0), (4, 16.0), (8, 20.0)),
        roots=Line(0, 0),
        layer=Line(2.0, 0.1),
        catch_up=Line(0, 0),
        control=Line(0, 0.25),
    )
    trace = draft_trace(platt((0.0, 1.0)), num_requests=2, length=5)
    trace.context[:] = np.arange(10) * 20 + 10  # 100 on average
    node, plain = (20 - 16 + 4 * 0.25) / 4, 16 / 4
    costs = gate_costs(curve, 4, trace)
    assert costs.node == pytest.approx(node / plain)
    assert costs.layer == pytest.approx((2.0 / 4 + 0.1) / plain)
    attention = 5.0 / 1000 * 100
    costs = gate_costs(replace(curve, context_us=5.0, node_context_us=1.0), 4, trace)
    assert costs.node == pytest.approx((node + attention / 5) / (plain + attention), abs=1e-4)
    assert gate_costs(None, 4, trace) == GateCosts()


@pytest.mark.parametrize("count", [4, 5, 9])
def test_every_fourth_request_is_held_out_whole(count: int) -> None:
    """Catches requests that are cut in two: their continuations would end there."""
    trace = draft_trace(Q_ITSELF, count, 5)
    seen, unseen = split_requests(trace, 4)
    assert sorted({*seen.requests, *unseen.requests}) == list(range(count))
    assert set(unseen.requests) == {r for r in range(count) if r % 4 == 3}
    assert seen.num_roots + unseen.num_roots == trace.num_roots


def test_too_few_requests_are_not_split() -> None:
    trace = draft_trace(Q_ITSELF, 3, 5)
    assert split_requests(trace, 4) == (trace, trace)
