# SPDX-License-Identifier: Apache-2.0
"""Reading stored trees back. When that happens is tested in tests/core/test_packing."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_echo import ops

Table = dict[str, torch.Tensor]


def random_step(source: random.Random, num_slots: int, room: int, num_requests: int) -> Table:
    """Requests whose tokens are the stored ones, or some of them, or nearly."""

    def table(least: int, most: int, *shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        values = [source.randint(least, most) for _ in range(count)]
        return torch.tensor(values, dtype=torch.int32).view(shape)

    tokens = table(0, 9, num_slots, room)
    slots = torch.tensor([source.randrange(num_slots) for _ in range(num_requests)]).long()
    width = source.randint(0, room)
    scheduled = tokens[slots][:, :width].clone()
    for row in scheduled[::2]:
        if width:
            row[source.randrange(width)] = -1
    return {
        "tokens": tokens,
        "parents": table(-1, 9, num_slots, room),
        "depths": table(1, 9, num_slots, room),
        "num_nodes": table(0, room, num_slots),
        "slots": slots,
        "scheduled": scheduled,
        "num_scheduled": table(-1, width + 1, num_requests),
    }


def obvious_structure(step: Table) -> list[list[list[int]]]:
    parents, depths = [], []
    width = step["scheduled"].shape[1]
    for slot, scheduled, count in zip(
        *(step[name].tolist() for name in ("slots", "scheduled", "num_scheduled")), strict=True
    ):
        used = range(max(0, min(count, width)))
        stored = step["tokens"][slot].tolist()
        known = count <= int(step["num_nodes"][slot]) and all(
            stored[node] == scheduled[node] for node in used
        )
        chain = list(range(width))
        own = step["parents"][slot, :width].tolist(), step["depths"][slot, :width].tolist()
        parents.append(own[0] if known else [node - 1 for node in chain])
        depths.append(own[1] if known else [node + 1 for node in chain])
    return [parents, depths]


def assert_read(step: Table) -> None:
    got = ops.read_trees(**step)
    for tensor in got:
        assert tensor.dtype == torch.int32
        assert tensor.shape == step["scheduled"].shape
    assert [tensor.tolist() for tensor in got] == obvious_structure(step)


@settings(max_examples=200, deadline=None)
@given(
    num_slots=st.integers(1, 5),
    room=st.integers(0, 8),
    num_requests=st.integers(0, 6),
    seed=st.integers(),
)
def test_any_step_is_read_as_by_the_obvious_version(
    num_slots: int, room: int, num_requests: int, seed: int
) -> None:
    """Counts below 0 and beyond the columns, no request and no column included."""
    assert_read(random_step(random.Random(seed), num_slots, room, num_requests))


def test_rows_are_read_by_their_stride() -> None:
    step = random_step(random.Random(1), 6, 8, 40)
    for name in ("tokens", "parents", "depths", "scheduled"):
        step[name] = torch.cat([step[name], step[name]], dim=1)[:, : step[name].shape[1]]
        assert not step[name].is_contiguous()
    assert_read(step)


def good_step() -> Table:
    return random_step(random.Random(0), 3, 4, 2)


@pytest.mark.parametrize("slot", [-1, 3, 2**62, -(2**63)])
def test_a_slot_outside_the_table_is_never_read(slot: int) -> None:
    step = good_step()
    assert_read(step)
    step["slots"][1] = slot
    with pytest.raises(ValueError, match=f"read_trees: slots names slot {slot} of 3 for request 1"):
        ops.read_trees(**step)


def test_more_columns_than_the_table_has_are_refused() -> None:
    step = good_step()
    step["scheduled"] = torch.zeros(2, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match="read_trees: scheduled has 5 columns, but tokens"):
        ops.read_trees(**step)


@pytest.mark.parametrize("name", ["parents", "depths", "num_nodes", "scheduled", "num_scheduled"])
def test_tensors_of_another_length_are_refused_by_name(name: str) -> None:
    step = good_step()
    step[name] = step[name][:-1]
    with pytest.raises(ValueError, match=f"read_trees: {name} must have size . in dimension 0"):
        ops.read_trees(**step)
