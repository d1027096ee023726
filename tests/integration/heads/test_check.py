# SPDX-License-Identifier: Apache-2.0
"""A head that does not fit is one message at start-up, not a shape error in a worker."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.heads.kit import Tensors, change_config, change_tensors, refused

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", ["/no/such/head", "./head", "~/no-such-head", "a/b/c"])
def test_a_folder_that_is_not_there(target: Path, name: str) -> None:
    assert f"model: there is no folder '{name}'" in refused(target, name)


def test_a_file_and_a_folder_without_config(target: Path, copy: Path) -> None:
    assert "is a file; give the folder" in refused(target, str(copy / "config.json"))
    (copy / "config.json").unlink()
    assert "has no config.json" in refused(target, str(copy))


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff"])
def test_a_broken_config(target: Path, copy: Path, content: str) -> None:
    (copy / "config.json").write_bytes(content.encode("latin-1"))
    assert "config.json" in refused(target, str(copy))


def test_a_hub_name_that_cannot_be_loaded(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.transformers_utils import config

    def not_found(*args: Any, **kwargs: Any) -> None:
        raise OSError("nobody/nothing is not a model\nand more lines")

    monkeypatch.setattr(config, "get_config", not_found)
    message = refused(target, "nobody/nothing")
    assert "'nobody/nothing' is no folder here" in message
    assert "nobody/nothing is not a model)" in message


def test_a_whole_model_is_no_head(target: Path) -> None:
    assert "is no EAGLE-3 head that vLLM knows" in refused(target, str(target))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "is no EAGLE-3 head"),
        ({"architectures": ["PeagleLlamaForCausalLM"]}, "is no EAGLE-3 head"),
        ({"hidden_size": 64}, "hidden states of 64 values, but"),
        ({"target_hidden_size": 256}, "hidden states of 256 values, but"),
        ({"vocab_size": 400}, "a vocabulary of 400 tokens, but"),
        ({"draft_vocab_size": 500}, "draft_vocab_size 500, more than the 384"),
        ({"draft_vocab_size": 0}, "has draft_vocab_size 0"),
        ({"num_key_value_heads": 0}, "has num_key_value_heads 0"),
        ({"hidden_act": "gelu"}, "has hidden_act 'gelu'"),
        ({"draft_vocab_size": 255}, "has lm_head.weight of shape [256, 128]"),
    ],
)
def test_a_config_that_does_not_fit(
    target: Path, copy: Path, changes: dict[str, Any], expected: str
) -> None:
    change_config(copy, **changes)
    assert expected in refused(target, str(copy))


def test_more_children_than_tokens(target: Path, copy: Path) -> None:
    keep = 2
    change_config(copy, draft_vocab_size=keep)

    def cut(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:keep].contiguous()
        tensors["d2t"] = tensors["d2t"][:keep].contiguous()

    change_tensors(copy, cut)
    assert "echo.top_k: 3 is more than the head's 2 tokens" in refused(target, str(copy))


def test_a_configuration_that_contradicts_itself(target: Path, copy: Path) -> None:
    """transformers refuses it with an error of its own kind."""
    change_config(copy, hidden_size=130, head_dim=None)
    assert refused(target, str(copy)).startswith("model: ")
