# SPDX-License-Identifier: Apache-2.0
"""`vllm-echo calibrate` and `vllm-echo profile` from their options to their files, with an engine
that is not there."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.calibration.kit import CURVE, FakeEngine, never, platt
from vllm_echo.cli import main as cli
from vllm_echo.core.acceptance import KINDS
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import StepLoad
from vllm_echo.core.policies import make_policy
from vllm_echo.integration import offline

INTERRUPTED = 130
NUM_PROMPTS = 24
BATCH = 8


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "OfflineEngine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "engines", [])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"why {i}?"}) + "\n" for i in range(NUM_PROMPTS)))
    return path


Calibrate = Callable[..., int]


@pytest.fixture
def calibrate(prompts: Path) -> Calibrate:
    def run(output: Path, *more: str, draft: str | None = "heads/head") -> int:
        sizes = {"--batch": BATCH, "--output-tokens": 30, "--max-depth": 4, "--target-depth": 3}
        named = ["--draft", draft] if draft else []
        command = ["calibrate", "--model", "models/target", "--prompts", str(prompts), *named]
        command += [str(word) for pair in sizes.items() for word in pair]
        return cli.main([*command, "--output", str(output), *more])

    return run


def profile(output: Path, *more: str) -> int:
    command = ["profile", "--model", "models/target", "--draft", "heads/head"]
    return cli.main([*command, "--max-requests", "8", "--output", str(output), *more])


def strict(path: Path) -> dict[str, Any]:
    """JSON as other programs read it, which know no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{path} holds {word}")

    content: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    return content


def served(path: Path) -> EchoConfig:
    return EchoConfig.from_speculative_config(strict(path))


def files(output: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in output.parent.iterdir() if p.is_file()}


RESULTS = {"echo.json", "echo.calibration.md", "echo.calibration.png"}


def test_calibrate_writes_a_file_to_serve_with_a_report_and_a_picture(
    tmp_path: Path, calibrate: Calibrate, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "echo.json"
    assert calibrate(output) == 0
    assert set(files(output)) == RESULTS
    assert list(output.parent.glob("*/")) == [], "the pieces are gone"
    config = served(output)
    assert (config.max_depth, config.target_depth, config.top_k) == (4, 3, 3)
    assert {0, 3} <= {gate.depth for gate in config.gates}
    assert config.calibration is not None
    for model in config.calibration.models():
        assert model.curves[0] == pytest.approx((-0.3, 0.8), abs=0.25)
    report = files(output)["echo.calibration.md"].decode()
    assert report.startswith("# Calibration of head for target\n")
    for depth in (1, 2, 3, 4):
        assert f"\n| {depth} | " in report
    for words in ("AUC", "fitted gates", "default gates", "no gates", *KINDS):
        assert words in report
    assert files(output)["echo.calibration.png"].startswith(b"\x89PNG")
    told = capsys.readouterr()
    assert report in told.out
    assert f"[vllm-echo] wrote {output}" in told.out
    assert "6/6" in told.err
    assert "collecting" not in told.out, "progress is not the result"


def test_calibrate_asks_the_engine_for_full_trees_and_no_verification(
    tmp_path: Path, calibrate: Calibrate
) -> None:
    """Catches gates, or slots for fewer nodes than the layers have, in what is measured; and engine
    options that get lost on the way."""
    more = ["--top-k", "2", "--dtype", "float32", "--max-model-len", "300", "--enforce-eager"]
    assert calibrate(tmp_path / "echo.json", *more) == 0
    (engine,) = FakeEngine.engines
    model, draft, tree, num_nodes, arguments = engine.arguments
    assert (model, draft) == ("models/target", "heads/head")
    assert arguments == {
        "dtype": "float32",
        "max_num_seqs": BATCH,
        "max_model_len": 300,
        "enforce_eager": True,
    }
    config = EchoConfig.from_dict({**tree, "num_speculative_tokens": num_nodes})
    assert make_policy(config).shape.frontier_widths == (2, 2, 2)
    assert config.gates == ()
    asked = [prompt for piece in engine.recorded for prompt in piece]
    assert len(asked) == len(KINDS) * NUM_PROMPTS
    assert {asked.count(prompt) for prompt in asked} == {len(KINDS)}
    assert engine.closed


def test_the_same_command_writes_the_same_bytes(tmp_path: Path, calibrate: Calibrate) -> None:
    """In another folder, and over what it wrote before."""
    one, other = tmp_path / "one" / "echo.json", tmp_path / "other" / "echo.json"
    assert calibrate(one) == calibrate(other) == 0
    first = files(one)
    assert files(other) == first
    assert calibrate(one) == 0
    assert files(one) == first
    assert len(FakeEngine.engines) == 3, "each has measured"


def test_another_seed_is_another_sample(tmp_path: Path, calibrate: Calibrate) -> None:
    one, other = tmp_path / "one" / "echo.json", tmp_path / "other" / "echo.json"
    assert calibrate(one) == calibrate(other, "--seed", "7") == 0
    assert files(one)["echo.json"] != files(other)["echo.json"]


@pytest.mark.parametrize("stop", [0, 1, 5])
def test_an_interrupted_run_goes_on_to_the_same_result(
    tmp_path: Path,
    calibrate: Calibrate,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stop: int,
) -> None:
    output, whole = tmp_path / "stopped" / "echo.json", tmp_path / "whole" / "echo.json"
    assert calibrate(whole) == 0
    monkeypatch.setattr(FakeEngine, "interrupt_at", stop)
    capsys.readouterr()
    assert calibrate(output) == INTERRUPTED
    assert "interrupted; run the same command again to go on" in capsys.readouterr().err
    assert FakeEngine.engines[-1].closed
    assert not output.exists()

    monkeypatch.setattr(FakeEngine, "interrupt_at", None)
    assert calibrate(output) == 0
    assert len(FakeEngine.engines[-1].recorded) == 6 - stop
    assert files(output) == files(whole)
    assert list(output.parent.glob("*/")) == []


def test_the_bar_of_a_run_that_goes_on_begins_where_it_was(
    tmp_path: Path,
    calibrate: Calibrate,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches pieces of yesterday that make the time that is left look short."""
    output = tmp_path / "echo.json"
    monkeypatch.setattr(FakeEngine, "interrupt_at", 4)
    assert calibrate(output) == INTERRUPTED
    monkeypatch.setattr(FakeEngine, "interrupt_at", None)
    capsys.readouterr()
    assert calibrate(output) == 0
    told = capsys.readouterr().err
    assert "4/6 [00:00<?, ?piece/s]" in told
    assert "6/6" in told


def test_what_was_collected_can_be_fitted_on_the_way(
    tmp_path: Path, calibrate: Calibrate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And stays, for the run to go on."""
    output, whole = tmp_path / "stopped" / "echo.json", tmp_path / "whole" / "echo.json"
    assert calibrate(whole) == 0
    monkeypatch.setattr(FakeEngine, "interrupt_at", 4)
    assert calibrate(output) == INTERRUPTED
    assert calibrate(output, "--use-collected") == 0
    assert served(output).calibration is not None
    assert files(output)["echo.json"] != files(whole)["echo.json"]
    monkeypatch.setattr(FakeEngine, "interrupt_at", None)
    assert calibrate(output) == 0
    assert len(FakeEngine.engines[-1].recorded) == 2
    assert files(output) == files(whole)


def test_nothing_collected_is_said(
    tmp_path: Path, calibrate: Calibrate, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(tmp_path / "echo.json", "--use-collected") == cli.EXIT_ERROR
    message = capsys.readouterr().err
    assert "holds nothing yet; collect without --use-collected" in message
    assert FakeEngine.engines == []


def test_kept_pieces_are_fitted_without_an_engine(tmp_path: Path, calibrate: Calibrate) -> None:
    output, work = tmp_path / "echo.json", tmp_path / "pieces"
    assert calibrate(output, "--work", str(work), "--keep-work") == 0
    first = files(output)
    assert len(list(work.glob("*.npz"))) == 6
    assert calibrate(output, "--work", str(work), "--concurrency", "4") == 0
    assert len(FakeEngine.engines) == 1
    assert files(output) == first
    assert not work.exists()


def test_pieces_of_another_seed_are_not_mixed_in(
    tmp_path: Path,
    calibrate: Calibrate,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "echo.json"
    monkeypatch.setattr(FakeEngine, "interrupt_at", 2)
    assert calibrate(output) == INTERRUPTED
    assert calibrate(output, "--seed", "1") == cli.EXIT_ERROR
    assert "with other inputs (seed); remove the folder" in capsys.readouterr().err


def test_a_run_goes_on_whether_the_head_is_named_or_the_file_names_it(
    tmp_path: Path, calibrate: Calibrate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches pieces that are taken for another head's."""
    output = tmp_path / "echo.json"
    output.write_text('{"method": "echo", "model": "heads/head"}')
    monkeypatch.setattr(FakeEngine, "interrupt_at", 2)
    assert calibrate(output) == INTERRUPTED
    monkeypatch.setattr(FakeEngine, "interrupt_at", None)
    assert calibrate(output, draft=None) == 0
    assert len(FakeEngine.engines[-1].recorded) == 4


LOADS = [StepLoad(n, 0, 200 * n) for n in (1, 4, 16, 64)]


@pytest.mark.parametrize("policy", ["echo", "goodput", "static", "chain", "ddd"])
@pytest.mark.parametrize("budget", [None, 32, "auto"])
def test_a_head_that_is_never_right_drafts_nothing(
    tmp_path: Path,
    calibrate: Calibrate,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    policy: str,
    budget: int | str | None,
) -> None:
    """Catches a closed root gate that is taken to be enough: the first layer is drafted all the
    same, and width spends the budget on it."""
    output = tmp_path / "echo.json"
    options = {"policy": policy, "k_max": budget, "profile": CURVE.to_dict()}
    output.write_text(json.dumps({"method": "echo", "model": "heads/head", "echo": options}))
    monkeypatch.setattr(FakeEngine, "law", staticmethod(never))
    assert calibrate(output) == 0
    told = capsys.readouterr().out
    assert "the head was never right: the root gate lets nothing pass" in told
    assert "greedy requests: nothing that the head drafted is worth verifying" in told
    assert "sampled requests: nothing that the head drafted is worth verifying" in told
    assert 'nothing will be drafted ("k_max" is ' in told
    config = served(output)
    assert config.policy == policy
    assert config.k_max == (0 if budget == 32 else "auto")
    for load in LOADS:
        for num_sampled in (0, load.num_requests):
            assert make_policy(config).offer(load, num_sampled).num_nodes == 0
    first = files(output)
    assert calibrate(output) == 0
    assert files(output) == first


def test_a_budget_of_nothing_is_pointed_out_when_the_head_is_right(
    tmp_path: Path, calibrate: Calibrate, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file of a head that has been trained on since: it would go on drafting nothing."""
    output = tmp_path / "echo.json"
    output.write_text('{"method": "echo", "model": "heads/head", "echo": {"k_max": 0}}')
    assert calibrate(output) == 0
    assert 'since "k_max" is 0: set it, or run `vllm-echo profile`' in capsys.readouterr().out
    assert served(output).k_max == 0


def test_a_head_that_is_right_drafts(tmp_path: Path, calibrate: Calibrate) -> None:
    """The same question as above, with the other answer."""
    output = tmp_path / "echo.json"
    assert profile(output) == 0
    assert calibrate(output) == 0
    config = served(output)
    assert config.k_max == "auto"
    assert make_policy(config).offer(LOADS[0]).num_nodes > 0


def test_too_few_samples_are_said_and_kept(
    tmp_path: Path, calibrate: Calibrate, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "echo.json"
    assert calibrate(output, "--limit", "1", "--output-tokens", "6") == cli.EXIT_ERROR
    message = capsys.readouterr().err
    assert "calibrate: greedy requests: only 15 candidates could be judged; give more" in message
    assert not output.exists()
    assert len(list((tmp_path / "echo.calibration").glob("*.npz"))) == 2


def test_few_samples_give_a_file_that_says_so(
    tmp_path: Path, calibrate: Calibrate, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "echo.json"
    assert calibrate(output, "--limit", "2") == 0
    told = capsys.readouterr().out
    assert "too few samples (" in told
    assert "the gate at depth 3 keeps the default threshold 0.3: collect more prompts" in told
    assert "greedy requests: too few candidates could be judged at depth " in told
    assert [gate.depth for gate in served(output).gates] == [0, 3]


def test_what_the_file_says_of_its_trees_holds(tmp_path: Path, calibrate: Calibrate) -> None:
    """Catches gates that lie deeper than the file's trees, after an hour of measuring, and a supply
    of nodes that will never be drafted."""
    output = tmp_path / "echo.json"
    echo = {"max-depth": 2, "target_depth": 2, "gates": [{"depth": 2, "threshold": 0.5}]}
    content = {"method": "echo", "model": "heads/head", "num-speculative-tokens": 5, "echo": echo}
    output.write_text(json.dumps(content))
    assert calibrate(output) == 0
    config = served(output)
    assert (config.num_speculative_tokens, config.max_depth, config.target_depth) == (5, 2, 2)
    assert [gate.depth for gate in config.gates] == [0, 1]
    assert config.calibration is not None
    for model in config.calibration.models():
        assert len(model.curves) == 2
        assert {point.depth for point in model.supply} == {1, 2}
    assert "\n| 4 | " in files(output)["echo.calibration.md"].decode(), "all of it is reported"


def test_gates_are_fitted_at_the_costs_of_the_profile(tmp_path: Path, calibrate: Calibrate) -> None:
    one, other = tmp_path / "one" / "echo.json", tmp_path / "other" / "echo.json"
    assert profile(other) == 0
    assert calibrate(one) == calibrate(other) == calibrate(other, "--concurrency", "8") == 0
    report = files(one)["echo.calibration.md"].decode()
    assert "Fitted for a node that costs 0.250 and a layer that costs 0.050" in report
    report = files(other)["echo.calibration.md"].decode()
    assert "Fitted for a node that costs" in report
    assert "costs 0.250" not in report


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        ({"model": "heads/other"}, [], "--draft: 'heads/head', but"),
        ({"echo": {"kmax": 3}}, [], "echo.kmax: unknown key"),
        ({"echo": {"target_depth": 6}}, [], "echo.target_depth: 6 lies beyond echo.max_depth 4"),
        ({}, ["--prompts", "nowhere.jsonl"], "--prompts: nowhere.jsonl cannot be read"),
        ({}, ["--output", "{prompts}/echo.json"], "--output: "),
        ({}, ["--work", "{folder}"], "--work: "),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_measured(
    tmp_path: Path,
    prompts: Path,
    calibrate: Calibrate,
    capsys: pytest.CaptureFixture[str],
    content: dict[str, Any],
    more: list[str],
    message: str,
) -> None:
    """Catches an hour of measuring for nothing."""
    output = tmp_path / "echo.json"
    text = json.dumps({"method": "echo", "model": "heads/head", **content})
    output.write_text(text)
    filled = [word.format(prompts=prompts, folder=tmp_path) for word in more]
    assert calibrate(output, *filled) == cli.EXIT_ERROR
    assert f"vllm-echo: error: {message}" in capsys.readouterr().err
    assert FakeEngine.engines == []
    assert output.read_text() == text


def test_a_model_too_short_for_the_answers_is_said(
    tmp_path: Path, calibrate: Calibrate, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches prompts that are cut to less than nothing."""
    assert calibrate(tmp_path / "echo.json", "--max-model-len", "40") == cli.EXIT_ERROR
    message = capsys.readouterr().err
    assert "--output-tokens: 30 leaves no room for a prompt, since the model's length is" in message
    assert FakeEngine.engines[0].closed
    assert FakeEngine.engines[0].recorded == []


def test_profile_writes_a_curve_a_budget_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "echo.json"
    assert profile(output) == 0
    assert set(files(output)) == {"echo.json", "echo.profile.png"}
    config = served(output)
    assert config.k_max == "auto"
    assert config.profile is not None
    # Batches of up to 8, and trees of up to 8 nodes for each of them.
    assert [rows for rows, _ in config.profile.step] == [1, 2, 4, 8, 16, 32, 64]
    for rows, ms in config.profile.step:
        assert ms == pytest.approx(CURVE.step_ms(rows), rel=0.02)
    assert files(output)["echo.profile.png"].startswith(b"\x89PNG")
    told = capsys.readouterr()
    assert "| requests | plain step, ms |" in told.out
    assert f"Knee of the paper's hinge: {config.profile.knee()} rows." in told.out
    assert "nan" not in told.out
    assert "44/44" in told.err
    assert "the machine was busy" not in told.err
    (engine,) = FakeEngine.engines
    assert engine.closed
    assert engine.arguments[4] == {"dtype": "auto", "max_num_seqs": 8, "enforce_eager": False}


def test_profile_asks_with_tokens_of_the_vocabulary(tmp_path: Path) -> None:
    """Different prompts, each as long as it is said to be."""
    assert profile(tmp_path / "echo.json", "--max-model-len", "512") == 0
    (engine,) = FakeEngine.engines
    lengths = {len(prompt) for prompts in engine.logged for prompt in prompts}
    assert lengths == {64, 256}
    for prompts in engine.logged:
        assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
        assert all(0 <= token < engine.vocab_size for prompt in prompts for token in prompt)


def test_the_same_machine_writes_the_same_bytes(tmp_path: Path) -> None:
    one, other = tmp_path / "one" / "echo.json", tmp_path / "other" / "echo.json"
    assert profile(one) == profile(other) == 0
    first = files(one)
    assert files(other) == first
    assert profile(one) == 0
    assert files(one) == first


def test_profile_leaves_the_rest_of_the_file(tmp_path: Path, calibrate: Calibrate) -> None:
    """A calibration, above all."""
    output = tmp_path / "echo.json"
    assert calibrate(output) == 0
    before = strict(output)
    assert profile(output) == 0
    after = strict(output)
    assert after["echo"].pop("profile")
    assert after["echo"].pop("k_max") == "auto"
    assert after == before


def test_a_busy_machine_is_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeEngine, "jitter", 0.4)
    assert profile(tmp_path / "echo.json") == 0
    assert "the machine was busy: step times differ by " in capsys.readouterr().err


def test_a_batch_that_never_fills_leaves_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no traceback."""
    output = tmp_path / "echo.json"
    monkeypatch.setattr(FakeEngine, "held", 3)
    assert profile(output) == cli.EXIT_ERROR
    assert "vllm-echo: error: profile: no step held all 4 requests" in capsys.readouterr().err
    assert not output.exists()
    assert FakeEngine.engines[0].closed


def test_an_interrupted_profile_leaves_the_file(
    tmp_path: Path, calibrate: Calibrate, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "echo.json"
    assert calibrate(output) == 0
    before = files(output)
    monkeypatch.setattr(FakeEngine, "interrupt_at", 5)
    assert profile(output) == INTERRUPTED
    assert files(output) == before
    assert FakeEngine.engines[-1].closed


def test_profile_refuses_what_cannot_work_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "echo.json"
    output.write_text('{"method": "echo", "model": "heads/other"}')
    assert profile(output) == cli.EXIT_ERROR
    assert "--draft: 'heads/head', but" in capsys.readouterr().err
    assert profile(output / "echo.json") == cli.EXIT_ERROR
    assert "--output: " in capsys.readouterr().err
    assert FakeEngine.engines == []


def test_rare_luck_is_no_acceptance(
    tmp_path: Path,
    calibrate: Calibrate,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A random head hits now and then; what it offers is not worth a row."""
    monkeypatch.setattr(FakeEngine, "law", staticmethod(platt((-6.0, 0.1))))
    assert calibrate(tmp_path / "echo.json") == 0
    assert "nothing that the head drafted is worth verifying" in capsys.readouterr().out
    config = served(tmp_path / "echo.json")
    assert config.k_max == "auto"
    policy = make_policy(replace(config, profile=CURVE))
    assert [policy.offer(load).num_nodes for load in LOADS] == [0] * len(LOADS)


def test_trees_that_no_request_can_hold_are_refused_by_their_options(
    tmp_path: Path, calibrate: Calibrate, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a message about num_speculative_tokens, which nobody gave."""
    output = tmp_path / "echo.json"
    assert calibrate(output, "--max-depth", "20", "--top-k", "16") == 2
    told = capsys.readouterr().err
    assert "--top-k: 16 with --max-depth 20 takes 305 draft slots" in told and "lower" in told
    assert not output.exists() and not FakeEngine.engines


@pytest.mark.parametrize("value", ["abc", "0", "-3", "1.5"])
def test_a_count_that_is_none_is_refused_in_words(
    tmp_path: Path, calibrate: Calibrate, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    with pytest.raises(SystemExit):
        calibrate(tmp_path / "echo.json", f"--limit={value}")
    assert f"{value!r} is no whole number above 0; give 1 or more" in capsys.readouterr().err
