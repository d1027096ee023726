# SPDX-License-Identifier: Apache-2.0
"""Which of the target's layers a head reads: said, counted, or guessed."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.heads import kit

pytestmark = pytest.mark.timeout(300)
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({IDS: [1, 2, 9]}, "has layers 0 to 4"),
        ({IDS: [1, 2, -1]}, "has layers 0 to 4"),
        ({IDS: [1, 2]}, f"reads 3 layers, but {IDS} [1, 2] names 2; correct the list"),
        ({IDS: [1, 2, 2]}, "names a layer twice"),
        ({IDS: "1,2,3"}, "which is no list"),
        ({"num_aux_hidden_states": 4}, "but reads 4 layers (num_aux_hidden_states)"),
        ({IDS: None}, f"too few (4) to guess; add {IDS}"),
    ],
    ids=["beyond", "negative", "too few", "twice", "text", "count", "unsaid"],
)
def test_layers_that_do_not_fit(
    target: Path, copy: Path, changes: dict[str, Any], expected: str
) -> None:
    assert expected in kit.refused(target, kit.change_config(copy, **changes))


@pytest.mark.parametrize("key", ["num_aux_layers", "num_aux_hidden_states"])
def test_a_bare_count_does_not_say_which_layers(target: Path, copy: Path, key: str) -> None:
    """vLLM builds an fc for four, hands out its default three, and dies in the first step."""
    kit.change_config(kit.as_qwen3(copy, None), **{key: 4})
    message = kit.refused(target, copy)
    assert f"reads 4 layers ({key}), and its config.json does not say which; add {IDS}" in message


def test_an_fc_for_four_layers_that_nobody_names(demo: dict[str, str], tmp_path: Path) -> None:
    """Neither ids nor a count: what the head reads can be seen by its fc alone."""
    from shutil import copytree

    folder = copytree(demo["draft"], tmp_path / "head")

    def widen(tensors: kit.Tensors) -> None:
        tensors["fc.weight"] = tensors["fc.weight"].repeat(1, 2)[:, : 4 * 576]

    kit.change_tensors(folder, widen)
    kit.change_config(folder, **{IDS: None, "num_aux_hidden_states": None})
    message = kit.refused(Path(demo["model"]), folder)
    assert "reads 4 layers, and its config.json does not say which" in message


def test_a_count_that_contradicts_the_ids_of_a_qwen3_head(target: Path, copy: Path) -> None:
    kit.change_config(kit.as_qwen3(copy, [0, 1, 2, 4]), num_aux_layers=3)
    assert "but reads 3 layers (num_aux_layers)" in kit.refused(target, copy)


def test_ids_in_any_order_are_taken(target: Path, copy: Path) -> None:
    assert kit.accepted(target, kit.reordered(copy, [2, 0, 1])).speculative_config is not None
