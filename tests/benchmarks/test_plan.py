# SPDX-License-Identifier: Apache-2.0
"""Order of measurements, groups of servers, estimates of time."""

from itertools import groupby

import pytest

from benchmarks.serving.engines import build_lineup
from benchmarks.serving.errors import BenchmarkError
from benchmarks.serving.plan import (
    Estimate,
    Measurement,
    Sizes,
    Sweep,
    by_key,
    kv_tokens_needed,
    next_round_fits,
    schedule,
    split_into_groups,
)
from tests.benchmarks.kit import ECHO_CONFIG, measurement

SWEEP = Sweep(rounds=2, temperatures=[0.0, 1.0], datasets=["mixed"], concurrencies=[1, 4])


def test_a_load_visits_all_engines_before_the_next_load():
    lineup = build_lineup(ECHO_CONFIG).select(["eagle3-2", "echo", "chain"])
    plan = schedule(lineup, [list(lineup.servers)], SWEEP)
    loads = [key for key, _ in groupby(plan, lambda p: (p.round, p.temperature, p.concurrency))]
    assert len(loads) == len(set(loads)) == 8
    order = ["none", "eagle3-2", "echo", "chain"]
    assert [p.engine for p in plan[:4]] == order
    assert [p.engine for p in plan if p.round == 1][:4] == order[::-1]
    assert len(set(plan)) == len(plan) == 2 * 2 * 2 * 4


def test_every_group_measures_its_own_baseline():
    lineup = build_lineup(ECHO_CONFIG).select(["eagle3", "echo"])
    groups = split_into_groups(list(lineup.servers), capacity=4)
    plan = schedule(lineup, groups, SWEEP)
    for number in range(len(groups)):
        assert "none" in {p.engine for p in plan if p.group == number}
    counts = [p.engine for p in plan if p.engine != "none"]
    assert len(counts) == 6 * 2 * 2 * 2


def test_groups():
    servers = ["none", "a", "b", "c", "d", "echo"]
    assert split_into_groups(servers, 6) == [["none", "echo", "a", "b", "c", "d"]]
    assert split_into_groups(servers, 4) == [
        ["none", "echo", "a", "b"],
        ["none", "c", "d"],
    ]
    assert split_into_groups(["none"], 1) == [["none"]]
    with pytest.raises(BenchmarkError, match="fewer than two servers"):
        split_into_groups(servers, 1)


def test_requests_of_a_measurement():
    sizes = Sizes(min_requests=12, requests_per_slot=3, max_requests=100)
    assert [sizes.requests(c) for c in (1, 4, 8, 32, 64, 128)] == [12, 12, 24, 96, 100, 128]


def test_kv_slots_grow_with_load_prompts_and_answers():
    assert kv_tokens_needed(2, 100, 50) == 2 * (120 + 50 + 64)


def test_an_estimate_learns_and_scales():
    estimate = Estimate(Sizes(), overhead=0.0)
    guess = estimate.seconds(4)
    estimate.learn(1, 3 * estimate.seconds(1))
    assert estimate.seconds(4) == pytest.approx(3 * guess)
    estimate.learn(4, 7.0)
    estimate.learn(4, 9.0)
    assert estimate.seconds(4) == 8.0
    plan = [Measurement(0, 0, 0.0, "mixed", 4, "none")] * 3
    assert estimate.total(plan) == 24.0


def test_no_round_begins_that_does_not_fit():
    estimate = Estimate(Sizes(), overhead=0.0)
    estimate.learn(1, 10.0)
    plan = [Measurement(0, r, 0.0, "mixed", 1, e) for r in range(3) for e in ("none", "echo")]
    assert next_round_fits(plan, 0, estimate, seconds_left=0.0)
    assert next_round_fits(plan, 2, estimate, seconds_left=20.0)
    assert not next_round_fits(plan, 2, estimate, seconds_left=19.0)


def test_what_is_done_is_recognised_in_the_journal():
    done = by_key([measurement("echo", 4, 1, 100.0)])
    assert done == {Measurement(0, 1, 0.0, "mixed", 4, "echo")}
