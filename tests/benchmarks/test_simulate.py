# SPDX-License-Identifier: Apache-2.0
"""The simulator: replay is the head that was recorded, steps are what an obvious loop does, and
roofline curves bend where arithmetic says."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.simulate.__main__ import main
from benchmarks.simulate.costs import add_up, drafting_ms, verification_ms
from benchmarks.simulate.gpus import Gpus, cost_curve, step_parts
from benchmarks.simulate.loop import Step, Workload, serve
from benchmarks.simulate.measured import read_measured
from benchmarks.simulate.models import MODELS, eagle3_head
from benchmarks.simulate.plans import DEFAULT_NAMES, Tuning, make_config
from benchmarks.simulate.replay import RecordedTrees, ReplayHead, easiest_requests
from tests.benchmarks.simulate_kit import CURVE, BigramHead, bigram_log_probs, record, trees_of
from vllm_echo.core.cost import CostCurve, StepLoad
from vllm_echo.core.draft import Frontier
from vllm_echo.core.trace import DraftTrace

ELASTIC = ("echo", "goodput", "dense", "fixed-threshold", "echo-no-transfer", "goodput-no-width")


@pytest.fixture(scope="module")
def trace() -> DraftTrace:
    return record()


@pytest.fixture(scope="module")
def recorded(trace: DraftTrace) -> RecordedTrees:
    return RecordedTrees(trace)


@pytest.mark.parametrize("name", ["chain-1", "chain-4", "static", "eagle3-tree", "echo-20", "ddd"])
def test_replay_drafts_what_the_head_would_draft(name: str, recorded: RecordedTrees) -> None:
    rows = torch.arange(0, recorded.trace.num_roots, 3)
    config = make_config(name, recorded, CURVE, Tuning())
    assert config is not None
    replay = ReplayHead(recorded, rows)
    replayed = trees_of(config, replay, len(rows))
    roots = torch.from_numpy(recorded.trace.root_tokens)[rows].long()
    assert replayed == trees_of(config, BigramHead(bigram_log_probs(), roots), len(rows))
    assert any(replayed)
    assert replay.num_unrecorded == 0


def test_children_nobody_recorded_are_none_and_counted(recorded: RecordedTrees) -> None:
    head = ReplayHead(recorded, torch.tensor([0]))
    _, log_probs = head.expand_roots(5)
    assert log_probs.isfinite().tolist() == [[True] * 3 + [False] * 2]
    frontier = Frontier(
        requests=torch.tensor([0]),
        tokens=recorded.tokens[:1, :3],
        parent_rows=torch.tensor([[0, 0, 0]]),
        depth=1,
        first_slot=0,
        ancestors=torch.zeros(1, 3, 1, dtype=torch.int64),
        columns=torch.tensor([[0, 1, 4]]),  # the last one was never drafted
    )
    recorded.first_child[0, 1] = -1
    _, log_probs = head.expand(frontier, 3)
    assert log_probs[0, 0].isfinite().all()
    assert not log_probs[0, 1:].isfinite().any()
    assert head.num_unrecorded == 1
    recorded.first_child[0, 1] = 6


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_chain_accepts_what_an_obvious_loop_accepts(depth: int, trace: DraftTrace) -> None:
    recorded = RecordedTrees(trace)
    config = make_config(f"chain-{depth}", recorded, CURVE, Tuning())
    steps = serve(recorded, config, Workload(batch=1, requests_per_slot=9))
    expected = []
    for request in range(trace.num_requests - 1):  # the last one has nothing to decode
        row, last = (trace.requests == request).nonzero()[0][[0, -1]]
        while row < last:
            accepted = obvious_chain(trace, row, min(depth, 40 - trace.positions[row] - 1))
            emitted = min(accepted + 1, last - row)
            expected.append(emitted)
            row += emitted
    expected += expected[: len(steps) - len(expected)]  # the ninth request is the first again
    assert [step.num_emitted for step in steps] == expected
    assert max(expected) == depth + 1


def obvious_chain(trace: DraftTrace, row: int, depth: int) -> int:
    node = -1
    for accepted in range(depth):
        children = [
            c
            for c in range(trace.tokens.shape[1])
            if trace.depths[c] == accepted + 1
            and trace.parents[row, c] == node
            and np.isfinite(trace.log_probs[row, c])
        ]
        ahead = row + accepted + 1
        same = ahead < trace.num_roots and trace.requests[ahead] == trace.requests[row]
        if not children or not same:
            return accepted
        node = children[0]
        if trace.tokens[row, node] != trace.root_tokens[ahead]:
            return accepted
    return depth


@pytest.mark.parametrize("name", DEFAULT_NAMES[1:] + ELASTIC)
def test_no_step_exceeds_its_budget(name: str, recorded: RecordedTrees) -> None:
    config = make_config(name, recorded, CURVE, Tuning())
    assert config is not None
    steps = serve(recorded, config, Workload(batch=6, num_steps=40))
    assert len(steps) == 40
    assert sum(step.num_nodes for step in steps) > 0
    for step in steps:
        assert step.num_nodes <= min(
            step.offered, step.num_drafting * config.num_speculative_tokens
        )
        assert step.load.num_requests <= step.num_emitted
        assert step.num_emitted <= step.load.num_requests + step.num_nodes


def test_plain_decoding_takes_the_steps_of_the_curve(recorded: RecordedTrees) -> None:
    steps = serve(recorded, None, Workload(batch=12, num_steps=30))
    assert [verification_ms(CURVE, step) for step in steps] == [CURVE.step_ms(12)] * 30
    assert [drafting_ms(CURVE, step) for step in steps] == [0.0] * 30
    result = add_up(CURVE, steps)
    assert result.step_ms == pytest.approx(16.0)
    assert result.tokens_per_s == pytest.approx(12 / 0.016)


def test_a_budget_of_nothing_is_plain_decoding(recorded: RecordedTrees) -> None:
    workload = Workload(batch=5, num_steps=25)
    config = make_config("echo-0", recorded, CURVE, Tuning())
    assert serve(recorded, config, workload) == serve(recorded, None, workload)


def test_a_step_costs_its_parts() -> None:
    step = Step(StepLoad(4, 0, 400), num_drafting=4, forwards=[12, 6], num_nodes=4)
    curve = replace(CURVE, context_us=10.0, node_context_us=5.0)
    attention = 0.01 * 400 + 0.005 * 100 * 4
    assert verification_ms(curve, step) == pytest.approx(12.0 + attention + 0.004)
    assert drafting_ms(curve, step) == pytest.approx(
        0.14 + 0.14 + (0.2 + 0.24) + (0.2 + 0.12) + 0.3
    )


@pytest.mark.parametrize("name", ["chain-2", "echo", "goodput"])
def test_equal_seeds_give_equal_runs(name: str, recorded: RecordedTrees) -> None:
    config = make_config(name, recorded, CURVE, Tuning())
    one, again, other = (
        serve(recorded, config, Workload(batch=7, num_steps=20, seed=seed)) for seed in (1, 1, 2)
    )
    assert one == again
    assert one != other


def test_every_prompt_is_prefilled_and_every_token_counted(trace: DraftTrace) -> None:
    recorded = RecordedTrees(trace)
    workload = Workload(batch=4, requests_per_slot=2, prefill=True, max_prefill_tokens=16)
    for config in (None, make_config("chain-2", recorded, CURVE, Tuning())):
        steps = serve(recorded, config, workload)
        prompts = sum(5 + request for request in range(8))
        assert sum(step.load.num_prefill_tokens for step in steps) == prompts
        assert max(step.load.num_prefill_tokens for step in steps) <= 16
        assert sum(step.num_first for step in steps) == 8
        assert sum(step.num_emitted + step.num_first for step in steps) == trace.num_roots - 1


def test_easiest_requests_are_accepted_longer(trace: DraftTrace) -> None:
    easy = easiest_requests(trace, 0.3)
    assert easy.num_requests == 3
    both = [RecordedTrees(t).chain_lengths().mean() for t in (easy, trace)]
    assert both[0] > both[1]


def test_a_trace_with_holes_is_refused(trace: DraftTrace) -> None:
    with pytest.raises(ValueError, match="missing positions"):
        RecordedTrees(trace.select(np.arange(trace.num_roots) != 5))


SIZES = {  # billions of parameters, as published
    "Llama-3.1-8B": 8.03,
    "Llama-3.3-70B": 70.6,
    "Qwen3-8B": 8.19,
    "Qwen3-32B": 32.8,
    "Qwen3-235B-A22B": 235.0,
    "Vicuna-13B": 13.0,
}


def test_model_shapes_add_up_to_their_published_sizes() -> None:
    assert MODELS.keys() == SIZES.keys()
    for name, model in MODELS.items():
        assert model.parameters / 1e9 == pytest.approx(SIZES[name], rel=0.003)
        assert eagle3_head(model).layer > model.attention_weights


@pytest.mark.parametrize("name", MODELS)
def test_roofline_curves_rise(name: str) -> None:
    curve = cost_curve(Gpus(), MODELS[name], 32, 500.0)
    times = [curve.step_ms(rows) for rows in range(1, 3000, 7)]
    assert times == sorted(times)
    for line in (curve.roots, curve.layer, curve.catch_up, curve.control):
        assert line.fixed > 0
        assert line.each > 0
    assert CostCurve.from_dict(curve.to_dict(), "curve") == curve


def test_dense_products_are_flat_up_to_the_knee_and_linear_beyond() -> None:
    gpus, model = Gpus(), MODELS["Llama-3.1-8B"]
    knee = 0.6 * 989e12 / (0.75 * 3.35e12)  # FLOPs in the time that a byte takes; 2 of each
    assert gpus.knee_rows() == pytest.approx(knee)

    def products(rows: float) -> float:
        parts = step_parts(gpus, model, rows, 1, 0.0)
        return parts.attention_products + parts.mlp_products + parts.output_layer

    assert products(1) == pytest.approx(products(0.99 * knee))
    assert products(2 * knee) == pytest.approx(2 * products(knee))
    weights = model.parameters - model.output_weights  # the embedding is not read
    assert products(1) == pytest.approx(1e6 * 2 * weights / (8 * 0.75 * 3.35e12))


def test_a_mixture_reads_the_experts_that_rows_reach() -> None:
    model = MODELS["Qwen3-235B-A22B"]
    assert model.distinct_experts(1) == pytest.approx(8)
    assert model.distinct_experts(2) == pytest.approx(16 - 8 * 8 / 128)
    assert model.distinct_experts(10_000) == pytest.approx(128)
    few, many = (step_parts(Gpus(), model, rows, 1, 0.0).mlp_products for rows in (1, 8))
    assert many / few == pytest.approx(128 * (1 - (120 / 128) ** 8) / 8)


def test_command_prints_tables_and_writes_json(
    tmp_path: Path, trace: DraftTrace, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.save(str(tmp_path / "trace.npz"))
    common = ["--trace", str(tmp_path / "trace.npz"), "--batch", "2", "256"]
    common += [
        "--steps",
        "3",
        "--turns",
        "0",
        "--policies",
        "plain",
        "chain-1",
        "eagle3-tree",
        "echo",
    ]
    output = tmp_path / "sim.json"
    main([*common, "--held-out", "--models", "Llama-3.1-8B", "--output", str(output)])
    printed = capsys.readouterr().out
    assert "### Beside the paper" in printed
    assert "+7.9%" in printed
    results = json.loads(output.read_text())["results"]["Llama-3.1-8B"]
    assert results["chain-1"]["2"]["tokens_per_s"] > 0

    echo_json = tmp_path / "echo.json"
    echo_json.write_text(json.dumps({"method": "echo", "echo": {"profile": CURVE.to_dict()}}))
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps({"plain": {"2": 150}, "eagle3, K = 1": {"2": 200}}))
    main([*common, "--curve", str(echo_json), "--measured", str(measured)])
    printed = capsys.readouterr().out
    assert "/ 200 (" in printed
    assert "### Beside the paper" not in printed


def test_measured_tables_are_read_in_several_spellings(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    raw = {
        "provenance": {"commit": "abc"},
        "no speculation": {"1": {"tokens_per_second": 60.0}},
        "eagle3, K = 2": {"1": 80},
        "echo": {"16": 420.5},
    }
    table.write_text(json.dumps(raw))
    expected = {"plain": {1: 60.0}, "chain-2": {1: 80.0}, "echo": {16: 420.5}}
    assert read_measured(table) == expected


def test_measured_journals_give_medians_of_greedy_rounds(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [{"kind": "settings", "rounds": 3}]
    for engine, temperature, speed in (
        ("none", 0.0, 60.0),
        ("none", 0.0, 64.0),
        ("none", 1.0, 50.0),
        ("none-sync", 0.0, 61.0),
        ("eagle3-4", 0.0, 70.0),
    ):
        fields = {"engine": engine, "temperature": temperature, "tokens_per_second": speed}
        lines.append({"kind": "measurement", "concurrency": 8, **fields})
    journal = tmp_path / "results.jsonl"
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_measured(journal) == {"plain": {8: 62.0}, "chain-4": {8: 70.0}}
    whole = tmp_path / "results.json"
    whole.write_text(json.dumps({"measurements": lines[1:]}))
    assert read_measured(whole) == read_measured(journal)


def test_measured_plain_decoding_is_the_better_of_its_settings_at_each_load(tmp_path: Path) -> None:
    """Catches an easier opponent: one setting is taken, and the other one listed as a policy."""
    speeds = {("none", 1): 30, ("none-sync", 1): 33, ("none", 16): 130, ("none-sync", 16): 128}
    lines = [
        {"engine": engine, "concurrency": load, "tokens_per_second": speed}
        for (engine, load), speed in speeds.items()
    ]
    whole = tmp_path / "results.json"
    whole.write_text(json.dumps({"measurements": lines}))
    assert read_measured(whole) == {"plain": {1: 33, 16: 130}}
