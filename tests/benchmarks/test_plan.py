# SPDX-License-Identifier: Apache-2.0
"""Order of measurements, groups of servers, estimates of time."""

from collections import Counter
from itertools import groupby, pairwise

import pytest

from benchmarks.serving.engines import build_lineup
from benchmarks.serving.errors import BenchmarkError
from benchmarks.serving.plan import (
    Estimate,
    Measurement,
    Sizes,
    Sweep,
    kv_tokens_needed,
    next_round_fits,
    schedule,
    split_into_groups,
    still_to_measure,
    visiting_order,
)
from tests.benchmarks.kit import ECHO_CONFIG, measurement

SWEEP = Sweep(rounds=2, temperatures=[0.0, 1.0], datasets=["mixed"], concurrencies=[1, 4])


def test_a_load_visits_all_engines_before_the_next_load():
    lineup = build_lineup(ECHO_CONFIG).select(["eagle3-2", "echo", "chain"])
    plan = schedule(lineup, [list(lineup.servers)], SWEEP)
    loads = [list(items) for _, items in groupby(plan, lambda p: p.place)]
    assert len(loads) == len({items[0].place for items in loads}) == 8
    expected = {"none", "none-sync", "eagle3-2", "echo", "chain"}
    assert all({p.engine for p in items} == expected for items in loads)
    assert len(set(plan)) == len(plan) == 2 * 2 * 2 * 5


@pytest.mark.parametrize("count", [2, 3, 5, 6, 8])
def test_no_engine_always_follows_the_same_one_nor_stands_in_the_same_place(count):
    """Catches a rotation that only moves the start, and one that only turns the order round: what
    the engine before leaves behind would always meet the same one."""
    engines = [f"e{number}" for number in range(count)]
    orders = [visiting_order(engines, number) for number in range(count)]
    assert all(sorted(order) == engines for order in orders)
    for place in range(count):
        assert {order[place] for order in orders} == set(engines)
    followed = Counter(pair for order in orders for pair in pairwise(order))
    assert max(followed.values()) == (1 if count % 2 == 0 else 2)


def test_the_order_of_a_load_changes_from_round_to_round():
    lineup = build_lineup(ECHO_CONFIG).select(["eagle3", "echo"])
    sweep = Sweep(rounds=3, temperatures=[0.0], datasets=["mixed"], concurrencies=[1, 4, 16])
    plan = schedule(lineup, [list(lineup.servers)], sweep)
    for load in sweep.concurrencies:
        orders = [
            [p.engine for p in plan if (p.round, p.concurrency) == (number, load)]
            for number in range(3)
        ]
        before = [dict(pairwise(reversed(order))) for order in orders]
        for engine in orders[0]:
            assert len({one.get(engine) for one in before}) > 1


def test_every_group_measures_both_settings_of_plain_decoding():
    lineup = build_lineup(ECHO_CONFIG).select(["eagle3", "echo"])
    groups = split_into_groups(list(lineup.servers), capacity=5)
    assert len(groups) == 2
    plan = schedule(lineup, groups, SWEEP)
    for number in range(len(groups)):
        assert {"none", "none-sync"} <= {p.engine for p in plan if p.group == number}
    counts = [p.engine for p in plan if p.engine not in ("none", "none-sync")]
    assert len(counts) == 6 * 2 * 2 * 2


def test_groups():
    servers = ["none", "none-sync", "a", "b", "c", "d", "echo"]
    plain = ["none", "none-sync"]
    assert split_into_groups(servers, 7) == [[*plain, "echo", "a", "b", "c", "d"]]
    assert split_into_groups(servers, 5) == [[*plain, "echo", "a", "b"], [*plain, "c", "d"]]
    assert split_into_groups(plain, 2) == [plain]
    for capacity in (2, 0):
        with pytest.raises(BenchmarkError, match=f"holds {capacity} servers, and 3 are the fewest"):
            split_into_groups(servers, capacity)


def test_requests_of_a_measurement():
    sizes = Sizes(min_requests=12, requests_per_slot=3, max_requests=100)
    assert [sizes.requests(c) for c in (1, 4, 8, 32, 64, 128)] == [12, 12, 24, 96, 100, 128]


def test_every_set_is_asked_as_often_as_the_others():
    """Catches a mixture that differs from load to load and from round to round."""
    sizes = Sizes(min_requests=8, requests_per_slot=1, max_requests=100)
    assert [sizes.requests(c, num_sets=6) for c in (1, 12, 64, 128)] == [12, 12, 66, 132]


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


def test_a_run_that_goes_on_measures_a_half_done_load_from_its_first_engine_on():
    """Catches ratios between measurements before and after an interruption."""
    plan = [Measurement(0, 1, 0.0, "mixed", c, e) for c in (1, 4, 16) for e in ("none", "echo")]
    done = [measurement(e, 1, 1, 100.0) for e in ("none", "echo")] + [measurement("none", 4, 1, 90)]
    assert still_to_measure(plan, done) == plan[2:]
    assert still_to_measure(plan, []) == plan
    assert still_to_measure(plan, [p.to_dict() for p in plan]) == []
