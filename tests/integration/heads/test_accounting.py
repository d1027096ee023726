# SPDX-License-Identifier: Apache-2.0
"""No parameter serves unfilled, no tensor is dropped: each is a message with tensor and key."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.integration.heads import kit
from tests.integration.heads.kit import add, change_config, change_tensors, drop, rename

pytestmark = pytest.mark.timeout(300)
ATTENTION, MLP = "midlayer.self_attn", "midlayer.mlp"
PROJECTIONS = [
    *(f"{ATTENTION}.{part}_proj.weight" for part in "qkvo"),
    *(f"{MLP}.{part}_proj.weight" for part in ("gate", "up", "down")),
]
NORMS = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]


@pytest.mark.parametrize(
    "name",
    [*PROJECTIONS, *(f"midlayer.{norm}.weight" for norm in NORMS), "norm.weight", "fc.weight"],
)
def test_a_missing_tensor_is_named(target: Path, copy: Path, name: str) -> None:
    """vLLM would serve whatever the memory held; a norm would stay ones."""
    message = kit.refused(target, change_tensors(copy, drop(name)))
    assert f"has no tensor {name}; export the head again" in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            rename("hidden_norm.", "hidden_norms."),
            "no tensor midlayer.hidden_norm.weight; its midlayer.hidden_norms.weight may be meant",
        ),
        (
            rename("midlayer.", "layers.1."),
            "no tensor layers.0.self_attn.q_proj.weight, layers.0.self_attn.k_proj.weight and 8 "
            "more; its layers.1.self_attn.q_proj.weight may be meant",
        ),
        (rename("q_proj", "query"), f"no tensor {ATTENTION}.q_proj.weight; "),
        (add("midlayer.mlp.router.weight", 4, 128), "has midlayer.mlp.router.weight, which vLLM"),
        (add("verifier_lm_head.weight", 384, 128), "has verifier_lm_head.weight, which vLLM"),
        (add("layers.0.hidden_norm.weight", 128), "which are one parameter to vLLM"),
    ],
    ids=["norm", "layer", "projection", "more", "outer", "both"],
)
def test_a_misspelt_tensor_is_named(
    target: Path, copy: Path, change: Callable[[kit.Tensors], None], expected: str
) -> None:
    assert expected in kit.refused(target, change_tensors(copy, change))


def test_prefixed_names_get_the_right_reason(target: Path, copy: Path) -> None:
    def prefix(tensors: kit.Tensors) -> None:
        for name in [name for name in tensors if name not in ("d2t", "lm_head.weight")]:
            tensors[f"model.{name}"] = tensors.pop(name)

    message = kit.refused(target, change_tensors(copy, prefix))
    assert "under names with a prefix (model." in message
    assert 'take "model." off the names' in message


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("fc_norm", "no tensor fc_norm.0.weight, fc_norm.1.weight and 1 more, which"),
        ("norm_before_fc", "no tensor input_norm.weight, which"),
        ("attention_bias", f"no tensor {ATTENTION}.q_proj.bias, {ATTENTION}.k_proj.bias and 2"),
        ("mlp_bias", f"no tensor {MLP}.gate_proj.bias, {MLP}.up_proj.bias and 1 more, which"),
    ],
)
def test_a_flag_without_its_tensors(target: Path, copy: Path, key: str, expected: str) -> None:
    message = kit.refused(target, change_config(copy, **{key: True}))
    assert expected in message
    assert f"({key}); export the head again, or correct {key}" in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (add("fc_norm.0.weight", 128), 'add "fc_norm": true'),
        (add("input_norm.weight", 384), 'add "norm_before_fc": true'),
        (add(f"{ATTENTION}.q_proj.bias", 128), 'add "attention_bias": true'),
        (add(f"{MLP}.up_proj.bias", 192), 'add "mlp_bias": true'),
        (add("lm_head.bias", 256), "has lm_head.bias, which"),
        (add(f"{ATTENTION}.q_norm.weight", 32), '["Eagle3Qwen3ForCausalLM"]'),
    ],
    ids=["fc_norm", "input_norm", "qkv bias", "mlp bias", "output bias", "q_norm"],
)
def test_tensors_without_their_flag(
    target: Path, copy: Path, change: Callable[[kit.Tensors], None], expected: str
) -> None:
    """vLLM drops some of them without a word (input_norm, biases), and dies of the others."""
    assert expected in kit.refused(target, change_tensors(copy, change))


def test_a_qwen3_head_without_its_norms(target: Path, copy: Path) -> None:
    change_config(copy, architectures=["Eagle3Qwen3ForCausalLM"], model_type="qwen3")
    message = kit.refused(target, copy)
    assert f"no tensor {ATTENTION}.q_norm.weight, {ATTENTION}.k_norm.weight, which" in message
    assert "(architectures); export the head again, or correct architectures" in message


@pytest.mark.parametrize(
    ("config", "stored", "expected"),
    [
        (2, 1, "num_hidden_layers 2 in its config.json, but no tensor layers.1."),
        (30, 1, "set num_hidden_layers to 1"),
        (1, 3, "num_hidden_layers 1 in its config.json, but also layers.1."),
        (2, 3, "set num_hidden_layers to 3"),
    ],
)
def test_layers_that_are_counted_wrong(
    target: Path, copy: Path, config: int, stored: int, expected: str
) -> None:
    kit.with_layers(copy, stored)
    assert expected in kit.refused(target, change_config(copy, num_hidden_layers=config))


def narrow(name: str) -> Callable[[kit.Tensors], None]:
    def change(tensors: kit.Tensors) -> None:
        tensors[name] = tensors[name][:, :-1]

    return change


def as_int8(name: str) -> Callable[[kit.Tensors], None]:
    def change(tensors: kit.Tensors) -> None:
        tensors[name] = tensors[name].to(torch.int8)

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (narrow("fc.weight"), "fc.weight of shape [128, 383], but its config.json asks for"),
        (narrow(PROJECTIONS[0]), f"{PROJECTIONS[0]} of shape [128, 255]"),
        (add("embed_tokens.weight", 380, 128), "embed_tokens.weight of shape [380, 128]"),
        (as_int8(PROJECTIONS[3]), "of type torch.int8, but no quantization_config"),
    ],
    ids=["fc", "projection", "embeddings", "type"],
)
def test_a_tensor_of_another_shape_or_type(
    target: Path, copy: Path, change: Callable[[kit.Tensors], None], expected: str
) -> None:
    assert expected in kit.refused(target, change_tensors(copy, change))


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_narrower_head_shares_nothing(target: Path, copy: Path, name: str) -> None:
    """vLLM keeps its own, uninitialised, where the widths differ."""

    def widen(tensors: kit.Tensors) -> None:
        shapes = {"embed_tokens.weight": (384, 64), "lm_head.weight": (384, 64)}
        tensors.pop("d2t")
        tensors.update({key: torch.ones(shape) for key, shape in shapes.items()})
        tensors["fc.weight"] = tensors["fc.weight"][:64]
        for key in [key for key in tensors if "norm" in key]:
            tensors[key] = tensors[key][:64]
        for key in PROJECTIONS:
            tensors[key] = narrowed(key, tensors[key])
        del tensors[name]

    change_tensors(copy, widen)
    change_config(copy, hidden_size=64, target_hidden_size=128, draft_vocab_size=384)
    message = kit.refused(target, copy)
    assert f"is 64 wide and the served model 128, so it needs an {name} of its own" in message


def narrowed(name: str, weight: torch.Tensor) -> torch.Tensor:
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return weight[:64]
    return weight[:, : 64 if ".mlp." in name else 128]


HARMLESS: dict[str, Callable[[kit.Tensors], None]] = {
    "rotary table": add(f"{ATTENTION}.rotary_emb.inv_freq", 16),
    "masked state": add("mask_hidden", 1, 384),
    "bias of zeros": add(f"{ATTENTION}.q_proj.bias", 128, value=0.0),
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_harmless_tensors_are_let_pass(target: Path, copy: Path, kind: str) -> None:
    change_tensors(copy, HARMLESS[kind])
    assert kit.accepted(target, copy).speculative_config is not None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (drop(f"{MLP}.up_proj.weight"), "no tensor midlayer.mlp.up_proj.weight"),
        (add("fc_norm.0.weight", 128), 'add "fc_norm": true'),
        (drop("d2t"), "has no map d2t"),
        (narrow("fc.weight"), "fc.weight of shape [128, 383]"),
    ],
    ids=["projection", "norm", "map", "shape"],
)
def test_a_quantised_head_is_accounted_for_layer_by_layer(
    target: Path, copy: Path, change: Callable[[kit.Tensors], None], expected: str
) -> None:
    kit.in_int8(copy)
    assert kit.accepted(target, copy).speculative_config is not None
    assert expected in kit.refused(target, change_tensors(copy, change))


def test_columns_of_a_quantised_fc_cannot_be_put_in_order(target: Path, copy: Path) -> None:
    kit.in_int8(copy)
    change_tensors(copy, as_int8("fc.weight"))
    change_config(copy, eagle_aux_hidden_state_layer_ids=[3, 1, 2])
    assert "[3, 1, 2], which do not ascend, and a quantised fc" in kit.refused(target, copy)
