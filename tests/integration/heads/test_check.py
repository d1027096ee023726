# SPDX-License-Identifier: Apache-2.0
"""A head that does not fit is one message at start-up, not a shape error in a worker."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs

from tests.serving import tiny
from vllm_echo.errors import EchoConfigError

pytestmark = pytest.mark.timeout(300)
Tensors = dict[str, torch.Tensor]


def refused(target: Path, model: str, **options: Any) -> str:
    raw = {"method": "echo", "model": model} | options
    args = EngineArgs(model=str(target), skip_tokenizer_init=True, speculative_config=raw)
    with pytest.raises(EchoConfigError) as caught:
        args.create_engine_config()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def copy(head: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "head"
    shutil.copytree(head, folder)
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def change_tensors(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


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
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "has layers 0 to 4"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "but reads 3 layers"),
        ({"draft_vocab_size": 255}, "has lm_head.weight of shape [256, 128]"),
    ],
)
def test_a_config_that_does_not_fit(
    target: Path, copy: Path, changes: dict[str, Any], expected: str
) -> None:
    change_config(copy, **changes)
    assert expected in refused(target, str(copy))


def drop(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def set_offset(index: int, value: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors["d2t"][index] = value

    return change


def narrow(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name][:, :-1].contiguous()

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (drop("fc.weight"), "has no tensor fc.weight"),
        (drop("d2t"), "has no map d2t"),
        (narrow("fc.weight"), "fc.weight of shape [128, 383]"),
        (set_offset(0, -1), "names tokens twice or outside"),
        (set_offset(255, tiny.VOCAB), "names tokens twice or outside"),
    ],
)
def test_tensors_that_do_not_fit(
    target: Path, copy: Path, change: Callable[[Tensors], None], expected: str
) -> None:
    change_tensors(copy, change)
    assert expected in refused(target, str(copy))


def test_a_broken_weights_file(target: Path, copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not json, alas")
    assert "broken file model.safetensors" in refused(target, str(copy))


def test_more_children_than_tokens(target: Path, copy: Path) -> None:
    keep = 2
    change_config(copy, draft_vocab_size=keep)

    def cut(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:keep].contiguous()
        tensors["d2t"] = tensors["d2t"][:keep].contiguous()

    change_tensors(copy, cut)
    assert "echo.top_k: 3 is more than the head's 2 tokens" in refused(target, str(copy))


def test_a_head_without_weights(target: Path, copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "no weights" in refused(target, str(copy))


def test_a_configuration_that_contradicts_itself(target: Path, copy: Path) -> None:
    """transformers refuses it with an error of its own kind."""
    change_config(copy, hidden_size=130, head_dim=None)
    assert refused(target, str(copy)).startswith("model: ")
