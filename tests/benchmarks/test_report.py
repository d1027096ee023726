# SPDX-License-Identifier: Apache-2.0
"""Tables, verdicts and pictures of made-up results."""

import pytest

from benchmarks.serving import plots, report
from benchmarks.serving.results import Condition, Results, Spread
from tests.benchmarks.kit import journal_of, measurement

GREEDY = Condition(0.0, "mixed")
# By engine and concurrency: tokens per second of two rounds. The machine is twice as fast in the
# second round. At one request plain decoding is faster in its other setting.
SPEEDS = {
    ("none", 1): (45, 90),
    ("none-sync", 1): (50, 100),
    ("none", 4): (200, 400),
    ("none-sync", 4): (190, 380),
    ("eagle3-1", 1): (60, 120),
    ("eagle3-1", 4): (180, 360),
    ("eagle3-2", 1): (75, 150),
    ("eagle3-2", 4): (100, 200),
    ("echo", 1): (70, 150),
    ("echo", 4): (210, 440),
}


@pytest.fixture
def journal(tmp_path):
    return journal_of(
        tmp_path,
        [
            measurement(engine, concurrency, number, speed)
            for (engine, concurrency), speeds in SPEEDS.items()
            for number, speed in enumerate(speeds)
        ],
    )


@pytest.fixture
def results(journal) -> Results:
    return Results(journal)


def test_ratios_are_to_the_better_plain_decoding_of_the_load_in_the_same_round(results):
    """Catches a comparison with one setting at all loads: at one request, echo would have 1.56."""
    assert [results.baseline(GREEDY, c) for c in (1, 4)] == ["none-sync", "none"]
    assert results.ratios(GREEDY, "echo", 1) == {0: 1.4, 1: 1.5}
    assert results.ratio(GREEDY, "echo", 4) == Spread(pytest.approx(1.075), 1.05, 1.1, 2)
    assert results.ratio(GREEDY, "none", 4) == Spread(1.0, 1.0, 1.0, 2)
    assert results.ratio(GREEDY, "none", 1) == Spread(0.9, 0.9, 0.9, 2)
    assert results.speed(GREEDY, "echo", 1).median == 110


def test_the_better_setting_is_one_for_all_rounds_of_a_load(tmp_path):
    """Catches the faster one of each round, which two equal settings are never behind; and medians
    of speeds, which a machine that drifts between groups decides."""
    speeds = {
        "none": [(100, 0), (110, 0), (100, 0), (50, 1), (50, 1), (50, 1)],
        "none-sync": [(104, 0), (100, 0), (103, 0), (51, 1), (51, 1), (49, 1)],
    }
    lines = [
        measurement(name, 1, number % 3, speed, group=group)
        for name, of in speeds.items()
        for number, (speed, group) in enumerate(of)
    ]
    lines += [measurement("echo", 1, number, 110) for number in range(3)]
    results = Results(journal_of(tmp_path, lines))
    assert results.baseline(GREEDY, 1) == "none-sync"
    assert results.ratios(GREEDY, "echo", 1) == {0: 110 / 104, 1: 110 / 100, 2: 110 / 103}


def test_a_load_that_was_interrupted_is_of_one_sitting(tmp_path):
    """Catches echo divided by a plain decoding of hours before."""
    lines = [
        measurement("none", 1, 0, 100),
        measurement("none-sync", 1, 0, 90),
        measurement("echo", 1, 0, 130),  # the interruption was here
        measurement("none", 1, 0, 50),
        measurement("none-sync", 1, 0, 45),
    ]
    assert Results(journal_of(tmp_path / "a", lines)).ratios(GREEDY, "echo", 1) == {}
    lines.append(measurement("echo", 1, 0, 60))
    results = Results(journal_of(tmp_path / "b", lines))
    assert results.ratios(GREEDY, "echo", 1) == {0: 1.2}
    assert results.speed(GREEDY, "none", 1) == Spread(50, 50, 50, 1)


def test_ratios_are_to_the_same_group(tmp_path):
    lines = [
        measurement("none", 1, 0, 100),
        measurement("echo", 1, 0, 120),
        measurement("none", 1, 0, 50, group=1),
        measurement("eagle3-1", 1, 0, 80, group=1),
    ]
    results = Results(journal_of(tmp_path, lines))
    assert results.ratios(GREEDY, "eagle3-1", 1) == {0: 1.6}
    assert results.quotient(GREEDY, "echo", "eagle3-1", 1).median == pytest.approx(1.2 / 1.6)


def test_the_best_chain_of_each_load(results):
    assert results.best(GREEDY, results.eagle3, 1) == "eagle3-2"
    assert results.best(GREEDY, results.eagle3, 4) == "eagle3-1"
    quotient = results.quotient(GREEDY, "echo", "eagle3-1", 4)
    assert (quotient.least, quotient.most) == (pytest.approx(210 / 180), pytest.approx(440 / 360))


def test_sums_over_the_sweep(results):
    # The baseline's medians, 75 and 300, carry the scale.
    assert results.sums(GREEDY, "eagle3-1") == {0: 1.2 * 75 + 0.9 * 300, 1: 1.2 * 75 + 0.9 * 300}
    spread = results.sum_quotient(GREEDY, "echo", "eagle3-1")
    assert spread.least == pytest.approx((1.4 * 75 + 1.05 * 300) / 360)


def test_an_incomplete_round_has_no_sum(tmp_path):
    lines = [measurement("none", c, r, 100) for c in (1, 4) for r in (0, 1)]
    lines += [measurement("echo", c, 0, 100) for c in (1, 4)] + [measurement("echo", 1, 1, 100)]
    assert list(Results(journal_of(tmp_path, lines)).sums(GREEDY, "echo")) == [0]


def test_accepted_length_steps_and_stages(results):
    assert results.accepted_length(GREEDY, "echo", 1) == pytest.approx(1.8)
    assert results.accepted_length(GREEDY, "none", 1) is None
    whole = 1000 * (1000 / 70 + 1000 / 150) / 400
    assert results.step_ms(GREEDY, "echo", 1) == pytest.approx(whole)
    assert results.stages(GREEDY, "echo", 1) == {"verify": 2.0, "rest": pytest.approx(whole - 2)}
    assert results.stages(GREEDY, "none", 1) == {}


def test_percentiles_are_taken_over_all_rounds(results):
    assert results.percentile(GREEDY, "none-sync", 1, "tpot", 50) == pytest.approx(20)
    assert results.percentile(GREEDY, "none-sync", 1, "tpot", 100) == pytest.approx(100)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.1, 1.2], "met"),
        ([0.98, 0.99], "met"),
        ([0.9, 0.97], "missed"),
        ([0.9, 1.0, 1.2], "met, not in every round"),
        ([0.9, 0.97, 1.2], "missed, not in every round"),
        ([1.2], "met, one round only"),
        ([0.9], "missed, one round only"),
    ],
)
def test_verdicts(values, text):
    assert report.verdict(Spread.of(values), 0.98)[-2:] == ["0.98", text]
    assert report.verdict(Spread.of(values), None)[-2:] == ["", ""]
    assert report.verdict(Spread.of([]), 0.98) == []


def test_the_speed_table(results):
    table = report.speed_table(results, GREEDY)
    assert "| tokens/s | c = 1 | c = 4 |" in table
    assert "| no speculation | 68 (**0.90**, 0.90..0.90) | 300 (**1**) |" in table
    assert (
        "| no speculation, --no-async-scheduling | 75 (**1**) | 285 (**0.95**, 0.95..0.95) |"
        in table
    )
    assert "| echo (default) | 110 (**1.45**, 1.40..1.50), 1.80 |" in table


def test_the_verdict_table(results):
    rows = report.verdict_table(results, GREEDY).splitlines()
    for row in (
        "| c = 1 | better plain: --no-async-scheduling | **1.450** | 1.400..1.500 | 2 | 0.98 "
        "| met |",
        "| c = 4 | better plain: as vLLM starts it | **1.075** | 1.050..1.100 | 2 | 0.98 | met |",
        "| c = 1 | best eagle3: K = 2 | **0.967** | 0.933..1.000 | 2 | 0.98 "
        "| missed, not in every round |",
        "| c = 4 | best eagle3: K = 1 | **1.194** | 1.167..1.222 | 2 | 0.98 | met |",
        "| sum over c | better plain of each load | **1.150** | 1.120..1.180 | 2 |  |  |",
        "| sum over c | best single eagle3: K = 1 | **1.198** | 1.167..1.229 | 2 | 1.15 | met |",
    ):
        assert row in rows
    assert "eagle3 was measured with K = 1, 2." in rows[0]


def test_a_report_says_what_was_measured_against_what(tmp_path):
    lines = [measurement(name, 1, 0, 100) for name in ("none", "none-sync", "echo")]
    plainly = report.render(journal_of(tmp_path / "a", lines))
    for expected in ("prompts included", "better of the two at that load", "no long prompts"):
        assert expected in plainly
    means = {"gsm8k": 90.0, "long": 2300.0}
    text = report.render(journal_of(tmp_path / "b", lines, mean_prompt_tokens=means))
    assert "Those of `long` have 1500 to 3000 tokens" in text and "no long prompts" not in text


def test_two_plain_servers_that_schedule_alike_are_called_so(tmp_path):
    """Catches a flag that changes nothing (vLLM's CPU platform turns asynchronous scheduling off
    by itself) taken for two settings."""

    def text_of(folder, *ahead):
        names = ("none", "none-sync")
        lines = [
            measurement(name, 1, 0, 100, schedules_ahead=value)
            for name, value in zip(names, ahead, strict=True)
        ]
        return report.render(journal_of(folder, lines))

    alike = text_of(tmp_path / "a", False, False)
    assert "no speculation: off; no speculation, --no-async-scheduling: off" in alike
    assert "were the same program" in alike
    differ = text_of(tmp_path / "b", True, False)
    assert "no speculation: on; no speculation, --no-async-scheduling: off" in differ
    assert "same program" not in differ


def sampled(engine: str, accepted: float) -> dict:
    line = measurement(engine, 1, 0, 100, temperature=1.0)
    line["drafting"]["accepted"] = accepted
    return line


def test_vllms_speculation_of_sampled_requests_is_not_shown_without_its_fault(tmp_path):
    """Catches a comparison that is won against a sampler that accepts nothing."""
    plain = [measurement(name, 1, 0, 100, temperature=1.0) for name in ("none", "none-sync")]
    mended = report.render(journal_of(tmp_path / "a", [*plain, sampled("eagle3-1", 30.0)]))
    section = mended[mended.index("## mixed, temperature 1") : mended.index("TPOT")]
    assert "accepted length 1.00" in section and "mended" in section
    assert "no comparison" not in section
    broken = report.render(journal_of(tmp_path / "b", [*plain, sampled("eagle3-1", 0.0)]))
    assert "**Nothing was accepted all the same of vLLM eagle3, K = 1" in broken
    for name, lines in (("c", plain), ("d", [measurement("eagle3-1", 1, 0, 100)])):
        assert "mended" not in report.render(journal_of(tmp_path / name, lines))


def test_the_whole_report(journal):
    text = report.render(journal)
    for expected in ("c0ffee", "a processor", "## mixed, greedy", "goodput was left out", "verify"):
        assert expected in text
    assert "quiet machine" not in text


def test_a_busy_machine_and_preemptions_are_reported(tmp_path):
    busy = {"server": 1.0, "idle_servers": 0.0, "others": 0.8}
    line = measurement("none", 1, 0, 100, busy_cores=busy)
    line["drafting"]["preemptions"] = 3
    text = report.render(journal_of(tmp_path, [line]))
    assert "0.80 cores busy" in text and "quiet machine" in text
    assert "preempted 3 times" in text


def test_a_run_without_the_default_has_no_verdict(tmp_path):
    journal = journal_of(tmp_path, [measurement("none", 1, 0, 100)], default=None)
    assert "divided by" not in report.render(journal)


def test_pictures(journal, tmp_path):
    paths = plots.draw_all(journal, tmp_path)
    assert {path.name for path in paths} == {
        f"{name}-mixed-t0.png" for name in ("throughput", "latency", "accepted-length", "stages")
    }
    assert all(path.stat().st_size > 1000 for path in paths)
    text = report.render(journal, paths)
    assert "![throughput-mixed-t0](throughput-mixed-t0.png)" in text
