# SPDX-License-Identifier: Apache-2.0
"""The map from draft tokens to the target's: a wrong one accepts nothing, and vLLM says nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.integration.heads import kit
from tests.serving import tiny

pytestmark = pytest.mark.timeout(300)
KEPT = tiny.DRAFT_VOCAB


def ids_of(tensors: kit.Tensors) -> torch.Tensor:
    return torch.arange(KEPT) + tensors["d2t"]


def add_mask(tensors: kit.Tensors) -> None:
    tensors["t2d"] = torch.zeros(tiny.VOCAB, dtype=torch.bool)
    tensors["t2d"][ids_of(tensors)] = True


def absolute(tensors: kit.Tensors) -> None:
    tensors["d2t"] = ids_of(tensors)


def set_offset(index: int, value: int) -> Callable[[kit.Tensors], None]:
    def change(tensors: kit.Tensors) -> None:
        tensors["d2t"][index] = value

    return change


def as_floats(tensors: kit.Tensors) -> None:
    tensors["d2t"] = tensors["d2t"].float()


def shorter(tensors: kit.Tensors) -> None:
    tensors["d2t"] = tensors["d2t"][:-1]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (kit.drop("d2t"), "drafts from 256 of 384 tokens (draft_vocab_size), but has no map d2t"),
        (
            kit.drop("lm_head.weight"),
            "drafts from 256 of 384 tokens (draft_vocab_size), but has no",
        ),
        (set_offset(0, -1), "names tokens twice or outside"),
        (set_offset(255, tiny.VOCAB), "names tokens twice or outside"),
        (absolute, "holds target ids"),
        (as_floats, "d2t of shape [256] and type torch.float32"),
        (shorter, "d2t of shape [255]"),
    ],
    ids=["no map", "no output layer", "twice", "outside", "ids", "floats", "short"],
)
def test_a_map_that_does_not_fit(
    target: Path, copy: Path, change: Callable[[kit.Tensors], None], expected: str
) -> None:
    assert expected in kit.refused(target, kit.change_tensors(copy, change))


def few_tokens(size: int, ids: torch.Tensor, offsets: bool) -> Callable[[kit.Tensors], None]:
    """A vocabulary of ``size`` whose ids, read as offsets, stay inside and distinct."""

    def change(tensors: kit.Tensors) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:size]
        tensors["d2t"] = ids - torch.arange(size) if offsets else ids
        tensors["t2d"] = torch.zeros(tiny.VOCAB, dtype=torch.bool)
        tensors["t2d"][ids] = True

    return change


LOW_IDS = torch.arange(96) * 2  # as offsets they name every third token


@pytest.mark.parametrize("offsets", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_ids_that_could_pass_as_offsets(
    target: Path, copy: Path, offsets: bool, masked: bool
) -> None:
    """Both readings are possible; t2d tells, or that offsets of so many tokens would repeat."""
    ids = LOW_IDS if masked or not offsets else torch.arange(96) + (torch.arange(96) > 40) * 9
    kit.change_tensors(copy, few_tokens(96, ids, offsets))
    if not masked:
        kit.change_tensors(copy, kit.drop("t2d"))
    kit.change_config(copy, draft_vocab_size=96)
    if offsets:
        assert kit.accepted(target, copy).speculative_config is not None
    else:
        message = kit.refused(target, copy)
        assert "d2t that holds target ids (0, 2, 4, ...)" in message
        assert "subtract torch.arange(96) from it" in message


def test_a_mask_that_belongs_to_another_map(target: Path, copy: Path) -> None:
    def change(tensors: kit.Tensors) -> None:
        add_mask(tensors)
        tensors["t2d"] = tensors["t2d"].roll(7)

    assert "contradict each other" in kit.refused(target, kit.change_tensors(copy, change))


def empty_mask(tensors: kit.Tensors) -> None:
    tensors["t2d"] = torch.zeros(tiny.VOCAB, dtype=torch.bool)


@pytest.mark.parametrize("change", [add_mask, empty_mask], ids=["right", "left empty"])
def test_a_map_with_its_mask_is_taken(
    target: Path, copy: Path, change: Callable[[kit.Tensors], None]
) -> None:
    assert kit.accepted(target, kit.change_tensors(copy, change)).speculative_config is not None


def test_a_full_vocabulary_has_zeros_for_offsets_and_nothing_else(target: Path, copy: Path) -> None:
    kit.with_full_vocabulary(copy)
    assert kit.accepted(target, copy).speculative_config is not None
    kit.change_tensors(copy, set_offset(3, 1))
    assert "drafts from all 384 tokens, so the entries of its d2t" in kit.refused(target, copy)
