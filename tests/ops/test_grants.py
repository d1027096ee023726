# SPDX-License-Identifier: Apache-2.0
"""The operators between two layers, at their edges; tests/core compares them with the reference."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.calls import GAIN, gain_arguments, layer_arguments
from vllm_echo import ops

SCORES = [0.0, -0.0, -0.25, -0.5, -0.5, -1.0, -120.0, -torch.inf, torch.inf, torch.nan]
budgets = st.integers(-2, 12) | st.sampled_from([2**31, 2**62, -(2**62)])


def obvious_layer(
    layer: dict[str, torch.Tensor], depth: int, threshold: float | None, budget: int
) -> tuple[list[bool], list[int], list[bool], list[int]]:
    """Deeper, layers, truncated and counts."""
    rows = {name: values.tolist() for name, values in layer.items()}
    confidence = layer["best"].double().exp().float()
    layers, truncated = rows["num_layers"], rows["truncated"]
    present = [r for r, on in enumerate(rows["active"]) if on and layer["best"][r] > -torch.inf]
    passed = [
        r for r in present if threshold is None or confidence[r] > torch.tensor(threshold).float()
    ]
    for r in set(present) - set(passed):
        truncated[r] = True
    wanting = [r for r in passed if layers[r] < rows["caps"][r]]
    granted = sorted(wanting, key=lambda r: (-confidence[r], r))[: max(budget, 0)]
    for r in granted:
        layers[r] += 1
    deeper = [r in granted and depth + 1 < rows["deepest"][r] for r in range(len(layers))]
    counts = [len(passed), len(present) - len(passed), len(granted)]
    return deeper, layers, truncated, counts


@settings(max_examples=200, deadline=None)
@given(
    count=st.integers(0, 9),
    threshold=st.none() | st.sampled_from([0.0, 0.25, 0.6, 1.0]),
    budget=budgets,
    seed=st.integers(),
)
def test_a_layer_is_granted_as_by_the_obvious_version(
    count: int, threshold: float | None, budget: int, seed: int
) -> None:
    source = random.Random(seed)

    def int32s(most: int) -> torch.Tensor:
        return torch.tensor([source.randint(0, most) for _ in range(count)], dtype=torch.int32)

    layer = {
        "best": torch.tensor(source.choices(SCORES, k=count)),
        "active": torch.tensor([source.random() < 0.8 for _ in range(count)]).bool(),
        "caps": int32s(3),
        "deepest": int32s(4),
        "num_layers": int32s(2),
        "truncated": torch.tensor([source.random() < 0.2 for _ in range(count)]).bool(),
    }
    expected = obvious_layer(layer, 1, threshold, budget)
    deeper, counts = ops.grant_layer(**layer, depth=1, threshold=threshold, budget=budget)
    got = (deeper, layer["num_layers"], layer["truncated"], counts)
    assert [tensor.tolist() for tensor in got] == list(expected)


def test_two_hundred_requests_with_one_confidence_are_served_in_order() -> None:
    layer = {name: values[:1].repeat(200) for name, values in layer_arguments().items()}
    deeper, counts = ops.grant_layer(**layer, depth=0, threshold=None, budget=130)
    assert deeper.tolist() == [True] * 130 + [False] * 70
    assert counts.tolist() == [200, 0, 130]


def test_no_gain_is_expected_of_no_number() -> None:
    arguments = gain_arguments()
    arguments["best"] = torch.tensor([torch.nan, -0.1, -torch.inf])
    assert ops.expect_gain(**arguments, depth=1, **GAIN).tolist() == [False, True, False]
    for name in GAIN:
        wild = {**GAIN, name: torch.nan}
        assert not ops.expect_gain(**arguments, depth=1, **wild).any()


@pytest.mark.parametrize(
    ("call", "make"),
    [
        (lambda a: ops.grant_layer(**a, depth=1, threshold=None, budget=2), layer_arguments),
        (lambda a: ops.expect_gain(**a, depth=1, **GAIN), gain_arguments),
    ],
)
def test_another_number_of_requests_is_refused_by_name(call, make) -> None:
    first, *others = make()
    for name in others:
        arguments = make()
        arguments[name] = torch.cat([arguments[name], arguments[name]])
        with pytest.raises(ValueError, match=f"{name} must have size"):
            call(arguments)
        assert make().keys() == arguments.keys()
    assert first == "best"
