# SPDX-License-Identifier: Apache-2.0
"""Heads in every form: each a copy of a good one with one change to config.json or to tensors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tests.serving import tiny
from vllm_echo.errors import EchoConfigError

Tensors = dict[str, torch.Tensor]


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def change_config(folder: Path, **changes: Any) -> Path:
    """Set keys of config.json; None takes a key out."""
    content = read_config(folder) | changes
    kept = {key: value for key, value in content.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def change_tensors(folder: Path, change: Callable[[Tensors], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    # Tensors of a file share no memory; what was left out of it must not stay mapped.
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def drop(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def add(name: str, *shape: int, value: float = 1.0) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = torch.full(shape, value, dtype=tensors["norm.weight"].dtype)

    return change


def rename(old: str, new: str) -> Callable[[Tensors], None]:
    """Replace ``old`` in all names."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def as_bin(folder: Path, name: str = "pytorch_model.bin", **options: Any) -> Path:
    """The weights as the EAGLE authors publish them."""
    torch.save(load_file(folder / "model.safetensors"), folder / name, **options)
    (folder / "model.safetensors").unlink()
    return folder


def as_shards(folder: Path) -> Path:
    """Two files and an index, beside a file that the index does not name."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2]}
    parts["model-00002-of-00002.safetensors"] = names[1::2]
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def as_qwen3(folder: Path, layer_ids: list[int] | None) -> Path:
    """A Qwen3-class head that reads ``layer_ids`` of the tiny target; None: four, unnamed."""
    num_layers = len(layer_ids) if layer_ids else 4

    def change(tensors: Tensors) -> None:
        gen = torch.Generator().manual_seed(7)
        shape = (tiny.HIDDEN, num_layers * tiny.HIDDEN)
        tensors["fc.weight"] = torch.randn(shape, generator=gen) * shape[1] ** -0.5
        for part in ("q_norm", "k_norm"):
            norm = 1 + 0.3 * torch.randn(tiny.HEAD_DIM, generator=gen)
            tensors[f"midlayer.self_attn.{part}.weight"] = norm

    change_tensors(folder, change)
    return change_config(
        folder,
        architectures=["Eagle3Qwen3ForCausalLM"],
        model_type="qwen3",
        eagle_aux_hidden_state_layer_ids=layer_ids,
    )


def as_speculators(folder: Path) -> Path:
    """The same head as the speculators library writes it: layers.0, and nested keys."""
    content = read_config(folder)
    outer = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "fc_norm", "norm_before_fc")
    kind = content["model_type"]
    written = {key: content.pop(key) for key in outer if key in content}
    written |= {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "norm_before_residual": content.pop("norm_before_residual", False),
        "transformer_layer_config": content | {"architectures": None, "model_type": kind},
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
        },
    }
    (folder / "config.json").write_text(json.dumps(written))
    return change_tensors(folder, rename("midlayer.", "layers.0."))


def with_full_vocabulary(folder: Path) -> Path:
    """All tokens, with a ``d2t`` of zeros and a ``t2d`` none the less."""

    def change(tensors: Tensors) -> None:
        gen = torch.Generator().manual_seed(8)
        tensors["lm_head.weight"] = 0.35 * torch.randn(tiny.VOCAB, tiny.HIDDEN, generator=gen)
        tensors["d2t"] = torch.zeros(tiny.VOCAB, dtype=torch.int64)
        tensors["t2d"] = torch.ones(tiny.VOCAB, dtype=torch.bool)

    change_tensors(folder, change)
    return change_config(folder, draft_vocab_size=tiny.VOCAB)


def with_fc_norms(folder: Path) -> Path:
    """Different norms for every layer, before ``fc`` and around all of its columns."""

    def change(tensors: Tensors) -> None:
        gen = torch.Generator().manual_seed(9)
        out, columns = tensors["fc.weight"].shape
        dtype = tensors["fc.weight"].dtype
        for layer in range(3):
            norm = 1 + 0.3 * torch.randn(columns // 3, generator=gen)
            tensors[f"fc_norm.{layer}.weight"] = norm.to(dtype)
        tensors["input_norm.weight"] = (1 + 0.3 * torch.randn(columns, generator=gen)).to(dtype)

    change_tensors(folder, change)
    return change_config(folder, fc_norm=True, norm_before_fc=True)


def reordered(folder: Path, order: list[int]) -> Path:
    """The same head with its layers named, and its columns lying, in another order."""
    layer_ids = read_config(folder)["eagle_aux_hidden_state_layer_ids"]

    def change(tensors: Tensors) -> None:
        blocks = tensors["fc.weight"].chunk(len(order), dim=1)
        tensors["fc.weight"] = torch.cat([blocks[i] for i in order], dim=1)
        if "input_norm.weight" in tensors:
            parts = tensors["input_norm.weight"].chunk(len(order))
            tensors["input_norm.weight"] = torch.cat([parts[i] for i in order])
        norms = [tensors.get(f"fc_norm.{i}.weight") for i in range(len(order))]
        for place, source in enumerate(order):
            if norms[source] is not None:
                tensors[f"fc_norm.{place}.weight"] = norms[source]

    change_tensors(folder, change)
    return change_config(folder, eagle_aux_hidden_state_layer_ids=[layer_ids[i] for i in order])


def with_layers(folder: Path, count: int) -> Path:
    """A head of several layers: the others read the hidden state alone."""

    def change(tensors: Tensors) -> None:
        gen = torch.Generator().manual_seed(10)
        for layer in range(1, count):
            block = tiny._block(gen, f"layers.{layer}.", tiny.HIDDEN)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                block[f"layers.{layer}.{norm}.weight"] = torch.ones(tiny.HIDDEN)
            tensors.update(block)

    change_tensors(folder, change)
    return change_config(folder, num_hidden_layers=count)


def with_biases(folder: Path) -> Path:
    def change(tensors: Tensors) -> None:
        gen = torch.Generator().manual_seed(11)
        for name in [n for n in tensors if "_proj.weight" in n]:
            bias = name.replace(".weight", ".bias")
            tensors[bias] = 0.1 * torch.randn(tensors[name].shape[0], generator=gen)

    change_tensors(folder, change)
    return change_config(folder, attention_bias=True, mlp_bias=True)


def with_fused_projections(folder: Path) -> Path:
    def change(tensors: Tensors) -> None:
        for whole, parts in (
            ("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("mlp.gate_up_proj", ("gate_proj", "up_proj")),
        ):
            stem = f"midlayer.{whole.split('.')[0]}"
            pieces = [tensors.pop(f"{stem}.{part}.weight") for part in parts]
            tensors[f"midlayer.{whole}.weight"] = torch.cat(pieces)

    return change_tensors(folder, change)


def without_aux_layers(folder: Path) -> Path:
    """A head that reads the target's last hidden state, as the first EAGLE did."""
    change_tensors(folder, drop("fc.weight"))
    return change_config(
        folder,
        eagle_aux_hidden_state_layer_ids=None,
        eagle_config={"use_aux_hidden_state": False},
    )


INT8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head", "re:.*fc$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token"}
            | {"dynamic": True, "symmetric": True},
        }
    },
}


def in_int8(folder: Path) -> Path:
    """The projections in 8 bits, a scale for each row; fc and the output layer as they are."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if "_proj.weight" in name]:
            weight = tensors[name]
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale

    change_tensors(folder, change)
    return change_config(folder, quantization_config=INT8)


def accepted(target: Path, model: Path | str, **options: Any) -> VllmConfig:
    """The engine's configuration with the head."""
    raw = {"method": "echo", "model": str(model)} | options
    args = EngineArgs(model=str(target), skip_tokenizer_init=True, speculative_config=raw)
    return args.create_engine_config()


def refused(target: Path, model: Path | str, **options: Any) -> str:
    """The one message with which the head is refused, before there is an engine."""
    with pytest.raises(EchoConfigError) as caught:
        accepted(target, model, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message, "a remedy follows"
    return message
