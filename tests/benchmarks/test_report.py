# SPDX-License-Identifier: Apache-2.0
"""Tables, verdicts and pictures of made-up results."""

import pytest

from benchmarks.serving import plots, report
from benchmarks.serving.results import Condition, Results, Spread
from tests.benchmarks.kit import journal_of, measurement

GREEDY = Condition(0.0, "mixed")
# By engine and concurrency: tokens per second of two rounds. The machine is twice as fast in the
# second round.
SPEEDS = {
    ("none", 1): (50, 100),
    ("none", 4): (200, 400),
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


def test_ratios_are_to_the_same_round(results):
    assert results.ratios(GREEDY, "echo", 1) == {0: 1.4, 1: 1.5}
    assert results.ratio(GREEDY, "echo", 4) == Spread(pytest.approx(1.075), 1.05, 1.1, 2)
    assert results.ratio(GREEDY, "none", 4) == Spread(1.0, 1.0, 1.0, 2)
    assert results.speed(GREEDY, "echo", 1).median == 110


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
    assert results.percentile(GREEDY, "none", 1, "tpot", 50) == pytest.approx(20)
    assert results.percentile(GREEDY, "none", 1, "tpot", 100) == pytest.approx(100)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.1, 1.2], "faster in every round"),
        ([0.8, 0.9], "slower in every round"),
        ([0.9, 1.2], "not resolved"),
        ([1.2], "one round only"),
    ],
)
def test_verdicts(values, text):
    assert report.verdict(Spread.of(values))[-1] == text
    assert report.verdict(Spread.of([])) == []


def test_the_speed_table(results):
    table = report.speed_table(results, GREEDY)
    assert "| tokens/s | c = 1 | c = 4 |" in table
    assert "| no speculation | 75 | 300 |" in table
    assert "| echo (default) | 110 (**1.45**, 1.40..1.50), 1.80 |" in table


def test_the_verdict_table(results):
    table = report.verdict_table(results, GREEDY)
    assert (
        "| c = 1 | no speculation | **1.450** | 1.400..1.500 | 2 | faster in every round" in table
    )
    assert "| c = 1 | best eagle3: K = 2 | **0.967** | 0.933..1.000 | 2 | not resolved |" in table
    assert "| sum over c | best single eagle3: K = 1 | **1.198** | 1.167..1.229 | 2 |" in table


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
