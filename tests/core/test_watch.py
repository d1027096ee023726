# SPDX-License-Identifier: Apache-2.0
"""A server whose cost curve is wrong finds out, on machines that are known, noisy and shared."""

import random
from dataclasses import replace

import pytest
import torch

from tests.core.served import SPOILT, TRUE, Machine, Server, drifting, plain_rate, with_rise
from vllm_echo.core.acceptance import Calibration, SupplyPoint, uncalibrated
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import CostCurve, Line, StepLoad
from vllm_echo.core.pipeline import EchoPipeline
from vllm_echo.core.trial import Correction, StepTimes, evaluate
from vllm_echo.core.watch import LAST_GAP, TRIAL, CostWatch, load_class, with_floors

MINUTE = 60.0
LOADS = (1, 8, 32)


def machine(seed: int = 0, **options: object) -> Machine:
    return Machine(source=random.Random(seed), **options)  # type: ignore[arg-type]


def load_of(requests: int) -> StepLoad:
    return StepLoad(requests, 0, 300 * requests)


def another_process(seconds: float) -> float:
    """Has the core, or the memory, for ten seconds of every 25."""
    return 1.6 if seconds % 25 < 10 else 1.0


@pytest.mark.parametrize("requests", LOADS)
@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_curve_is_mended_within_a_minute(name: str, requests: int) -> None:
    """The bar: 0.97 of plain decoding after a minute. And no staying at no drafts where they pay:
    as good as with the right curve."""
    server = Server(SPOILT[name], machine(1))
    server.serve(lambda: requests, MINUTE)
    found = server.serve(lambda: requests, 2 * MINUTE).rate
    right = Server(TRUE, machine(2), watch=False).serve(lambda: requests, 2 * MINUTE).rate
    assert found > 0.97 * plain_rate(machine(3), requests, 2 * MINUTE)
    assert found > 0.96 * right
    told = [message for message in server.messages if "depart from the cost curve" in message]
    assert len(told) == 1, "once for this load"


@pytest.mark.parametrize("requests", [8, 32])
def test_a_spoilt_curve_that_is_not_watched_is_the_loss_that_this_is_about(requests: int) -> None:
    """The simulation has teeth: a flat curve costs a tenth, and one that is too dear the gain."""
    plain = plain_rate(machine(3), requests, MINUTE)
    flat = Server(SPOILT["flat"], machine(1), watch=False).serve(lambda: requests, MINUTE)
    dear = Server(SPOILT["ten times too dear"], machine(1), watch=False)
    assert flat.rate < 0.9 * plain
    assert dear.serve(lambda: requests, MINUTE).drafting == 0


@pytest.mark.parametrize("name", SPOILT)
def test_it_is_mended_while_the_load_wanders(name: str) -> None:
    """Every load has its own trials; catches samples of one that count for another."""

    def wandering(source: random.Random) -> int:
        nonlocal now
        now = min(40.0, max(1.0, now + source.gauss(0, 0.5)))
        return round(now)

    rates = []
    for server in (Server(SPOILT[name], machine(1)), Server(TRUE, machine(2), watch=False)):
        now, source = 8.0, random.Random(3)
        rates.append(server.serve(lambda source=source: wandering(source), 5 * MINUTE).rate)
    assert rates[0] > 0.97 * rates[1]


@pytest.mark.parametrize("others", [another_process, drifting])
@pytest.mark.parametrize("requests", LOADS)
def test_a_machine_that_is_slower_for_a_while_changes_no_decision(
    others: object, requests: int
) -> None:
    """The curve is right, only the clock is not: catches plain steps of a quiet time that are
    compared with candidates of a busy one."""
    watched = Server(TRUE, machine(1, others=others))
    found = watched.serve(lambda: requests, 5 * MINUTE).rate
    fixed = Server(TRUE, machine(2, others=others), watch=False)
    assert found > 0.97 * fixed.serve(lambda: requests, 5 * MINUTE).rate


@pytest.mark.parametrize("requests", LOADS)
def test_looking_costs_less_than_a_hundredth(requests: int) -> None:
    """Steps that were other than they would have been, once nothing departs any more."""
    server = Server(TRUE, machine(1))
    server.serve(lambda: requests, 5 * MINUTE)
    later = server.serve(lambda: requests, 10 * MINUTE)
    drafting = later.drafting / later.steps
    assert min(drafting, 1 - drafting) < 0.01
    assert min(drafting, 1 - drafting) > 0, "and it goes on looking"


def test_a_head_that_is_worse_than_promised_is_left_alone() -> None:
    """The guard needs no curve: the calibration was made on other traffic, and the steps are as
    dear as they should be."""
    poor = Server(TRUE, machine(1), yields=0.3)
    poor.serve(lambda: 8, MINUTE)
    later = poor.serve(lambda: 8, 2 * MINUTE)
    assert later.drafting / later.steps < 0.05
    assert later.rate > 0.97 * plain_rate(machine(2), 8, 2 * MINUTE)
    unwatched = Server(TRUE, machine(1), watch=False, yields=0.3).serve(lambda: 8, MINUTE)
    assert unwatched.rate < 0.9 * plain_rate(machine(2), 8, MINUTE)
    assert sum("nothing is drafted there" in message for message in poor.messages) == 1


@pytest.mark.parametrize("yields", [0.0, 0.3])
def test_good_traffic_is_not_remembered_for_long(yields: float) -> None:
    """Catches a guard that averages over everything since the last change of the curve."""
    server = Server(TRUE, machine(1))
    server.serve(lambda: 8, 10 * MINUTE)
    server._yields = yields
    server.serve(lambda: 8, MINUTE)
    later = server.serve(lambda: 8, 2 * MINUTE)
    assert later.drafting / later.steps < 0.1


def test_drafting_comes_back_when_it_pays_again() -> None:
    """Traffic changes; off is not for ever."""
    server = Server(TRUE, machine(1), yields=0.3)
    off = server.serve(lambda: 8, 2 * MINUTE)
    server._yields = 1.0
    server.serve(lambda: 8, 4 * MINUTE)
    back = server.serve(lambda: 8, MINUTE)
    assert off.drafting / off.steps < 0.2
    assert back.drafting / back.steps > 0.9


def test_a_machine_that_changes_while_it_serves_is_followed() -> None:
    """Rows become three times as dear, as where a cache is lost to a neighbour: steps take longer,
    so there is a trial before its time."""
    server = Server(TRUE, machine(1))
    server.serve(lambda: 8, 5 * MINUTE)
    server.machine.curve = with_rise(TRUE, 3.0)
    server.serve(lambda: 8, MINUTE)
    found = server.serve(lambda: 8, 2 * MINUTE).rate
    assert found > 0.97 * plain_rate(machine(2, curve=server.machine.curve), 8, 2 * MINUTE)
    assert len(server.messages) >= 1


def test_other_ranks_decide_the_same_without_a_clock() -> None:
    """A rank that sees other times, and hears the verdicts, makes the same offers. Catches any
    decision that looks at a time of its own."""
    config = EchoConfig(policy="echo", gates=(), profile=SPOILT["ten times too cheap"])
    other = EchoPipeline(config, 256, torch.device("cpu"))
    server = Server(SPOILT["ten times too cheap"], machine(1))
    first, second = server.pipeline.watch, other.watch
    assert first is not None and second is not None
    offers: list[tuple[object, object]] = []
    ask, judge = server.pipeline.offer, first.judge

    def both(load: StepLoad, sampled: int = 0) -> object:
        offers.append((ask(load, sampled), other.offer(load, sampled)))
        return offers[-1][0]

    add = first.add

    def add_both(step: StepTimes) -> None:
        add(step)
        second.add(replace(step, target_ms=1.0, draft_ms=99.0))
        assert first.due == second.due

    def judge_for_both() -> object:
        verdict = judge()
        second.apply(verdict)
        return verdict

    server.pipeline.offer = both  # type: ignore[method-assign, assignment]
    first.add, first.judge = add_both, judge_for_both  # type: ignore[method-assign, assignment]
    loads = random.Random(5)
    server.serve(lambda: loads.choice([7, 8, 8, 31, 32]), 2 * MINUTE)
    assert all(one == another for one, another in offers)
    assert len({offer for offer, _ in offers}) > 4, "there was something to decide"
    assert server.messages


@pytest.mark.parametrize("prompts", [0.5, 0.7, 0.8])
def test_steps_with_prompts_are_no_measure_and_starve_none(prompts: float) -> None:
    """They take ten times as long, and say nothing about candidates. Catches trials that count them
    and end with too few of the others, again and again."""
    for seed in range(8):
        server = Server(SPOILT["flat"], machine(seed), prompts=prompts)
        server.serve(lambda: 32, MINUTE)
        later = server.serve(lambda: 32, 2 * MINUTE)
        assert later.drafting / later.steps < 0.2, seed


def test_a_load_that_never_has_a_clean_step_is_asked_ever_more_rarely() -> None:
    server = Server(TRUE, machine(1), prompts=1.0)
    total = server.serve(lambda: 8, 20 * MINUTE)
    assert server.pipeline.watch is not None
    assert server.pipeline.watch.curve(load_of(8)) == with_floors(TRUE)
    assert total.drafting / total.steps > 0.97


def test_a_constant_budget_and_a_fixed_curve_are_not_watched() -> None:
    """`"watch_costs": false` is reproducible; and where the curve decides nothing, or nothing may
    be drafted, there is nothing to watch."""
    for options in (
        {"watch_costs": False},
        {"policy": "echo", "k_max": 32},
        {"k_max": 0},
    ):
        config = EchoConfig(profile=TRUE, **options)  # type: ignore[arg-type]
        assert EchoPipeline(config, 4, torch.device("cpu")).watch is None
    assert EchoPipeline(EchoConfig(profile=TRUE), 4, torch.device("cpu")).watch is not None
    server = Server(SPOILT["flat"], machine(1), watch=False)
    server.serve(lambda: 8, MINUTE)
    assert server.verdicts == 0


def test_what_steps_have_shown_outlives_a_change_of_options() -> None:
    """Catches a comparison of policies in one server in which each is new at its costs every time,
    and a question for the options that makes a server forget."""
    config = EchoConfig(policy="echo", gates=(), profile=TRUE)
    pipeline = EchoPipeline(config, 4, torch.device("cpu"))
    watch = pipeline.watch
    pipeline.set_options(replace(config, policy="goodput"))
    assert pipeline.watch is not watch
    pipeline.set_options(EchoConfig.from_dict(config.to_dict()))
    assert pipeline.watch is watch


def test_loads_of_one_class_are_alike() -> None:
    """32 and what is left of them while some requests change are one; 8 and 16 are not."""
    assert load_class(29) == load_class(32) != load_class(16)
    assert load_class(8) != load_class(16)
    assert [load_class(n) for n in (1, 2, 3, 4)] == [0, 2, 3, 4]


@pytest.mark.parametrize("requests", [8, 32])
@pytest.mark.parametrize("policy", ["echo", "goodput"])
def test_a_head_that_is_always_sure_can_be_probed(policy: str, requests: int) -> None:
    """Its least offer has most of a node for every request: more than the probe's nodes, which have
    to be a cap and no price."""
    sure = replace(uncalibrated().greedy, supply=(SupplyPoint(0.5, 0.67, 0.66, ()),))
    config = EchoConfig(
        policy=policy,
        gates=(),
        profile=SPOILT["ten times too dear"],
        calibration=Calibration(sure, sure),
    )
    pipeline = EchoPipeline(config, 256, torch.device("cpu"))
    offers = [pipeline.offer(load_of(requests)).num_nodes for _ in range(30)]
    assert 0 < max(offers) <= max(4, requests // 2)
    assert 0 in offers


@pytest.mark.parametrize("step", [((4, 10.0), (8, 40.0), (16, 80.0)), ((64, 5.0),)])
@pytest.mark.parametrize("requests", [1, 8])
def test_any_curve_that_a_file_may_hold_is_served_under(
    step: tuple[tuple[int, float], ...], requests: int
) -> None:
    """No division by a step, or by a draft, of no time."""
    nothing = [0.0, 0.0]
    values = {"step": step, **dict.fromkeys(("roots", "layer", "catch_up", "control"), nothing)}
    server = Server(CostCurve.from_dict(values, "echo.profile"), machine(1))
    server.serve(lambda: requests, MINUTE)
    found = server.serve(lambda: requests, MINUTE).rate
    assert found > 0.97 * plain_rate(machine(3), requests, MINUTE)
    assert server.messages


# -- one trial ------------------------------------------------------------------------------


def steps_of(true: CostCurve, requests: int, nodes: int, slower: float = 1.0) -> list[StepTimes]:
    """A trial without noise, on a machine of the curve ``true`` that is ``slower`` as a whole."""
    steps = []
    for place in range(TRIAL):
        verified = nodes if place % 2 else 0
        load = load_of(requests)
        target = true.plain_ms(load)
        if verified:
            target += true.control.fixed + true.nodes_ms(load, verified)
        drafting = place % 2 == 0
        step = StepTimes(
            requests=requests,
            context=load.num_context_tokens,
            nodes=verified,
            tokens=requests,
            target_ms=slower * target,
            catch_up_ms=slower * (0.3 + (true.catch_up(requests) if drafting else 0)),
            draft_ms=slower * (true.roots(requests) + true.layer(3)) if drafting else 0.0,
            drafted=requests if drafting else 0,
            layers=1,
            expanded=3,
            kind="chosen",
        )
        steps.append(step)
    return steps


@pytest.mark.parametrize("slower", [1.0, 3.0])
@pytest.mark.parametrize("requests", [1, 8, 24])
@pytest.mark.parametrize("name", ["right", *SPOILT])
def test_a_corrected_curve_tells_what_was_measured(name: str, requests: int, slower: float) -> None:
    """In plain steps, at the load and the candidates of the trial; whatever the machine's speed.
    Catches factors that are applied to the wrong part, and a scale that is left in."""
    given = with_floors(SPOILT.get(name, TRUE))
    given = replace(given, roots=Line(8.0, 0.6), layer=Line(0.2, 0.0))
    trial = evaluate(steps_of(TRUE, requests, 6, slower), given)
    assert trial is not None
    found, load = trial.correction.of(given, requests), load_of(requests)
    plain, true_plain = found.plain_ms(load), TRUE.plain_ms(load)
    assert plain == pytest.approx(given.plain_ms(load))
    added = TRUE.control.fixed + TRUE.nodes_ms(load, 6)
    told = found.control.fixed + found.nodes_ms(load, 6)
    assert told / plain == pytest.approx(added / true_plain, rel=0.02)
    drafting = TRUE.roots(requests) + TRUE.layer(3)
    assert (found.roots(requests) + found.layer(3)) / plain == pytest.approx(drafting / true_plain)
    assert found.catch_up(requests) / plain == pytest.approx(TRUE.catch_up(requests) / true_plain)


def test_a_right_curve_departs_by_nothing() -> None:
    trial = evaluate(steps_of(TRUE, 8, 6, slower=2.0), TRUE)
    assert trial is not None
    assert trial.correction.departure(Correction(), trial) < 1e-6


def test_a_trial_of_too_few_steps_says_nothing() -> None:
    steps = steps_of(TRUE, 8, 6)
    assert evaluate([s for s in steps if s.nodes], TRUE) is None
    assert evaluate([s for s in steps if not s.nodes], TRUE) is None
    assert evaluate([], TRUE) is None


@pytest.mark.parametrize("rise", [0.3, 5.0, 10.0])
@pytest.mark.parametrize("requests", [3, 23, 45])
def test_a_correction_leaves_the_plain_step_alone(rise: float, requests: int) -> None:
    """Between two points of the curve, too, where what lies below cannot be far below."""
    found, load = Correction(rise=rise).of(TRUE, requests), load_of(requests)
    assert found.plain_ms(load) == pytest.approx(TRUE.plain_ms(load))
    added = TRUE.step_ms(requests + 6) - TRUE.step_ms(requests)
    told = found.step_ms(requests + 6) - found.step_ms(requests)
    assert told == pytest.approx(rise * added)


def test_every_corrected_curve_can_be_read_again() -> None:
    """No time of 0 and no falling step, whatever the factor."""
    for rise in (0.02, 0.3, 50.0):
        for requests in (1, 8, 64):
            for curve in (TRUE, *SPOILT.values()):
                found = Correction(rise=rise, node_ms=-1.0, drafting=0.1).of(curve, requests)
                assert CostCurve.from_dict(found.to_dict(), "profile") == found


def record(**counts: float) -> dict[str, object]:
    default = {"requests": 4, "rows": 6, "verified_nodes": 2, "context_tokens": 99, "continuing": 4}
    return {
        "period": 0.05,
        "seconds": {"catch_up": 0.002, "draft": 0.003, "verify": 0.03},
        "counts": {**default, "output_tokens": 5, **counts},
    }


def test_a_step_is_read_from_the_timers_record() -> None:
    step = StepTimes.of_record(record(drafted_requests=3, layers=2, frontier_nodes=8))
    assert (step.requests, step.nodes, step.tokens, step.context) == (4, 2, 5, 99)
    assert (step.drafted, step.layers, step.expanded) == (3, 2, 8)
    assert step.target_ms == pytest.approx(45)
    assert (step.catch_up_ms, step.draft_ms) == (2, 3)
    assert step.clean


def test_idle_time_and_prompts_are_seen() -> None:
    """A step behind a pause has the pause in its period: nobody in it was there before."""
    assert not StepTimes.of_record(record(continuing=0)).clean
    assert not StepTimes.of_record(record(rows=40)).clean


def test_trials_become_rare() -> None:
    watch = CostWatch(TRUE)
    server = Server(TRUE, machine(1))
    server.pipeline.watch = watch
    server.serve(lambda: 1, 10 * MINUTE)
    assert watch._at(1).gap == LAST_GAP
