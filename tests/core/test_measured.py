# SPDX-License-Identifier: Apache-2.0
"""Cost curves and calibrations in a configuration: what they become, and one message for each way
in which a file can be wrong."""

import json
from typing import Any

import pytest

from tests.core.measured import CALIBRATION, MISSING, PROFILE, changed
from vllm_echo.core.acceptance import AcceptanceModel, Calibration, SupplyPoint, uncalibrated
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import CostCurve, Line
from vllm_echo.errors import EchoConfigError

NAN, INF = float("nan"), float("inf")


def read(**options: Any) -> EchoConfig:
    return EchoConfig.from_speculative_config({"method": "echo", "model": "head", "echo": options})


def refused(**options: Any) -> str:
    with pytest.raises(EchoConfigError) as caught:
        read(**options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 250, "a file's whole content is no message"
    return message


def test_a_profile_is_read_into_a_curve() -> None:
    assert read(profile=PROFILE).profile == CostCurve(
        step=((1, 20.0), (8, 21.5), (64, 40.25)),
        roots=Line(0.2, 0.01),
        layer=Line(0.3, 0.02),
        catch_up=Line(0.1, 0.0),
        control=Line(0.05, 0.001),
        context_us=0.25,
        node_context_us=0.125,
    )


def test_what_a_context_costs_may_be_left_out() -> None:
    """A candidate then pays as much for its context as a request."""
    of_request = changed(PROFILE, "node_context_us", to=MISSING)
    curve = read(profile=of_request).profile
    assert curve is not None
    assert (curve.context_us, curve.node_context_us) == (0.25, 0.25)
    curve = read(profile=changed(of_request, "context_us", to=MISSING)).profile
    assert curve is not None
    assert (curve.context_us, curve.node_context_us) == (0.0, 0.0)


def test_a_calibration_is_read_into_two_models() -> None:
    supply = (
        SupplyPoint(0.1, 4.0, 1.5, (0.8, 0.5)),
        SupplyPoint(0.5, 1.0, 0.7, (0.0, 0.0)),
        SupplyPoint(0.6, 0.8, 0.6, ()),
    )
    greedy = AcceptanceModel(((0.1, 0.9), (-0.2, 1.1)), (0.7, 0.6, 0.55), supply)
    sampled = AcceptanceModel(((0.1, 0.9), (-0.2, 1.1)), (0.5,), supply)
    calibration = read(calibration=CALIBRATION).calibration
    assert calibration == Calibration(greedy, sampled)
    assert calibration.models() == (greedy, sampled)


def test_deeper_nodes_use_the_last_entry() -> None:
    """Catches an IndexError where trees are deeper than those of the calibration."""
    model = Calibration.from_dict(CALIBRATION, "c").greedy
    assert [model.curve_at(depth)[1] for depth in (1, 2, 3, 255)] == [0.9, 1.1, 1.1, 1.1]
    assert [model.best_child_at(depth) for depth in (1, 3, 4, 255)] == [0.7, 0.55, 0.55, 0.55]


def test_whole_numbers_are_numbers() -> None:
    """JSON writers drop `.0`; the curve must not depend on it."""
    whole = changed(PROFILE, "step", to=[[1, 20], [8, 22]])
    assert read(profile=whole) == read(profile=changed(whole, "step", to=[[1, 20.0], [8, 22.0]]))


def test_neither_is_there_unless_given() -> None:
    assert read().profile is None
    assert read().calibration is None
    assert read(profile=None, calibration=None) == read()


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, True),
        ({"k_max": 8}, True),
        ({"k_max": 8, "policy": "echo"}, False),
        ({"k_max": 8, "gates": []}, False),
        ({"policy": "echo"}, True),
        ({"policy": "goodput"}, True),
        ({"policy": "ddd", "k_max": "auto"}, True),
        ({"policy": "dense", "k_max": 8}, False),
    ],
)
def test_a_configuration_says_whether_it_needs_a_profile(
    options: dict[str, Any], needed: bool
) -> None:
    assert read(**options).needs_profile is needed


def test_both_survive_the_way_to_a_worker() -> None:
    """Through JSON, as `to_dict` promises, and equal to what was given."""
    config = read(profile=PROFILE, calibration=CALIBRATION, policy="goodput", k_max="auto")
    values = json.loads(json.dumps(config.to_dict()))
    assert EchoConfig.from_dict(values) == config
    assert values["profile"] == PROFILE
    assert values["calibration"] == CALIBRATION


def test_one_price_may_stand_at_several_depths() -> None:
    """What a head supplies depends on how deep it is drafted."""
    supply = [[0.1, 1.0, 0.7, []], [0.1, 2.0, 1.1, [0.5]], [0.3, 0.5, 0.4, []]]
    model = read(calibration=changed(CALIBRATION, "greedy", "supply", to=supply)).calibration
    assert model is not None
    assert [(p.price, p.depth) for p in model.greedy.supply] == [(0.1, 1), (0.1, 2), (0.3, 1)]


def test_the_uncalibrated_head_is_a_calibration_like_any_other() -> None:
    """It stands in, so it has to pass the checks, and offer less the higher the price and the
    less deep it is drafted."""
    values = json.loads(json.dumps(uncalibrated().to_dict()))
    assert Calibration.from_dict(values, "c") == uncalibrated()
    for model in uncalibrated().models():
        points = {(point.price, point.depth): point for point in model.supply}
        prices = sorted({price for price, _ in points})
        assert prices[0] > 0 and prices[-1] < 1
        for cheap, dear in zip(prices, prices[1:], strict=False):
            depths = [depth for price, depth in points if price == dear]
            for depth in depths:
                assert points[cheap, depth].nodes > points[dear, depth].nodes > 0
                assert points[cheap, depth].accepted > points[dear, depth].accepted > 0
            for one, deeper in zip(depths, depths[1:], strict=False):
                assert points[dear, one].accepted < points[dear, deeper].accepted
        for point in model.supply:
            assert point.price * point.nodes <= point.accepted <= point.nodes
            assert list(point.layers) == sorted(point.layers, reverse=True)
            assert all(0 <= chance <= 1 for chance in point.layers)


def profile_cases() -> list[tuple[tuple[str | int, ...], Any, tuple[str, ...]]]:
    """Path, wrong value, and what the message has to say besides the path."""
    write = "vllm-echo profile"
    cases: list[tuple[tuple[str | int, ...], Any, tuple[str, ...]]] = [
        ((), [1, 2], ("[1, 2] is a list", "an object", write)),
        ((), "machine.json", ('"machine.json" is a text', write)),
        (("step",), MISSING, ("is missing", write)),
        (("step",), {}, ("{} is an object", "a list of [rows, ms]", write)),
        (("step",), [], ("is empty", write)),
        (("step", 1), 8, ("8 is a number", "[rows, milliseconds]")),
        (("step", 1), [8], ("has 1 values", "[rows, milliseconds]")),
        (("step", 1), [8, 1.0, 2.0], ("has 3 values",)),
        (("step", 1), [8, "21"], ('"21" is no finite number', "[rows, milliseconds]")),
        (("step", 1), [8, NAN], ("NaN is no finite number",)),
        (("step", 1), [8, INF], ("Infinity is no finite number",)),
        (("step", 1), [True, 1.0], ("true is no finite number",)),
        (("step", 1), [1, 21.5], ("rows do not ascend", write)),
        (("step", 2), [4, 21.5], ("rows do not ascend", write)),
        (("context_us",), "0.1", ('"0.1" is no finite number', "microseconds")),
        (("context_us",), NAN, ("NaN is no finite number",)),
        (("node_context_us",), -0.5, ("node_context_us", "-0.5", "microseconds per candidate")),
        (("control", 0), -100.0, ("-100.0 is below 0", "[fixed ms, ms per item]", write)),
    ]
    for line in ("roots", "layer", "catch_up", "control"):
        cases += [
            ((line,), MISSING, ("is missing", write)),
            ((line,), 0.2, ("0.2 is a number", "[fixed ms, ms per item]")),
            ((line,), [0.2], ("has 1 values", "[fixed ms, ms per item]")),
            ((line,), [0.2, None], ("null is no finite number",)),
        ]
    return cases


def calibration_cases() -> list[tuple[tuple[str | int, ...], Any, tuple[str, ...]]]:
    write = "vllm-echo calibrate"
    point = "[price, nodes, accepted, [chance of layer 2, 3, ...]]"
    cases: list[tuple[tuple[str | int, ...], Any, tuple[str, ...]]] = [
        ((), 3, ("3 is a number", "an object", write)),
        (("greedy",), MISSING, ("is missing", write)),
        (("sampled",), MISSING, ("is missing", write)),
        (("sampled",), [], ("[] is a list", "an object", write)),
    ]
    for kind in ("greedy", "sampled"):
        for name in ("curves", "best_child", "supply"):
            cases += [
                ((kind, name), MISSING, ("is missing", write)),
                ((kind, name), {}, ("{} is an object", "a list", write)),
                ((kind, name), [], ("is empty", write)),
            ]
        supply = (kind, "supply")
        cases += [
            ((kind, "curves", 1), [0.1], ("has 1 values", "[intercept, slope]")),
            ((kind, "curves", 1), 0.1, ("0.1 is a number", "[intercept, slope]")),
            ((kind, "curves", 1), [0.1, 0], ("slope 0", "a number above 0", write)),
            ((kind, "curves", 1), [0.1, -2.5], ("slope -2.5", "a number above 0", write)),
            ((kind, "curves", 1), [NAN, 1.0], ("NaN is no finite number",)),
            ((kind, "best_child", 0), 1.5, ("1.5 is no probability", "from 0 to 1")),
            ((kind, "best_child", 0), "0.5", ('"0.5" is a text', "from 0 to 1")),
            ((*supply, 1), 0.5, ("0.5 is a number", point)),
            ((*supply, 1), [0.5, 1.0, 0.7], ("has 3 values", point)),
            ((*supply, 1, 1), None, ("null is no finite number", point)),
            ((*supply, 1, 3), 0.5, ("0.5 is a number", point)),
            ((*supply, 1, 3, 0), "x", ('"x" is no finite number', point)),
            ((*supply, 1, 0), 0.1, ("prices and depths do not ascend", write)),
            ((*supply, 1, 0), 0.05, ("prices and depths do not ascend", write)),
            ((*supply, 1), [0.1, 1.0, 0.7, [0.0]], ("prices and depths do not ascend", write)),
        ]
    return cases


def key_of(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


def outer_key(path: tuple[str | int, ...]) -> str:
    """The path, or that of the list that holds the number: both are one line to look at."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    return key_of(path)


@pytest.mark.parametrize(("path", "value", "expected"), profile_cases())
def test_a_wrong_profile_is_named(
    path: tuple[str | int, ...], value: Any, expected: tuple[str, ...]
) -> None:
    message = refused(profile=changed(PROFILE, *path, to=value))
    assert message.startswith(f"echo.profile{key_of(path)}"), message
    assert all(part in message for part in expected), message


@pytest.mark.parametrize(("path", "value", "expected"), calibration_cases())
def test_a_wrong_calibration_is_named(
    path: tuple[str | int, ...], value: Any, expected: tuple[str, ...]
) -> None:
    message = refused(calibration=changed(CALIBRATION, *path, to=value))
    assert message.startswith(f"echo.calibration{outer_key(path)}"), message
    assert all(part in message for part in expected), message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"profile": PROFILE | {"steps": []}}, ("profile.steps: unknown key", "'step'?")),
        ({"profile": PROFILE | {"gpu": "H200"}}, ("profile.gpu: unknown key", "known are step")),
        ({"calibration": CALIBRATION | {"greedi": {}}}, ("calibration.greedi:", "'greedy'?")),
        (
            {"calibration": changed(CALIBRATION, "greedy", "curve", to=[])},
            ("calibration.greedy.curve: unknown key", "'curves'?"),
        ),
    ],
)
def test_unknown_keys_are_named(options: dict[str, Any], expected: tuple[str, ...]) -> None:
    message = refused(**options)
    assert message.startswith("echo."), message
    assert all(part in message for part in expected), message


HUGE = 10**400


@pytest.mark.parametrize(
    "options",
    [
        {"profile": changed(PROFILE, "context_us", to=HUGE)},
        {"calibration": changed(CALIBRATION, "greedy", "best_child", 0, to=HUGE)},
        {"threshold": HUGE},
        {"gates": [{"depth": 0, "threshold": HUGE}]},
    ],
)
def test_numbers_beyond_all_floats_are_named(options: dict[str, Any]) -> None:
    """JSON has whole numbers of any length; Python's float has not."""
    assert refused(**options).startswith("echo.")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("step", 0), [0.5, 20.0]),
        (("step", 0), [-8, 20.0]),
        (("step", 0), [1, -20.0]),
        (("step", 0), [1, 0.0]),
        (("roots",), [-1.0, 0.0]),
        (("layer",), [0.2, -0.5]),
        (("context_us",), -1.0),
    ],
)
def test_a_profile_that_no_machine_has_is_refused(path: tuple[str | int, ...], value: Any) -> None:
    """Rows are counted, and work takes time: a step of 0 ms divides by zero later, in serving."""
    message = refused(profile=changed(PROFILE, *path, to=value))
    assert message.startswith(f"echo.profile{key_of(path)}"), message


@pytest.mark.parametrize(
    ("place", "value"), [((0,), 1.5), ((0,), -0.1), ((1,), -4.0), ((2,), -1.0), ((3, 0), 2.0)]
)
def test_a_supply_that_no_head_has_is_refused(place: tuple[int, ...], value: float) -> None:
    """Prices and chances are probabilities, counts are not negative."""
    path = ("greedy", "supply", 1 if value > 0 else 0, *place)
    message = refused(calibration=changed(CALIBRATION, *path, to=value))
    assert message.startswith("echo.calibration.greedy.supply["), message
