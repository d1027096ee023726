# SPDX-License-Identifier: Apache-2.0
"""The net in the worker: what no check before the start could see is seen where weights load.

A head from the hub is such a head. Here a folder stands for it, with the check at the start left
out; and so that the last net is tried, with the accounting left out as well.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.heads import kit
from tests.serving.harness import Engine, echo_engine
from tests.serving.test_head_forms import FORMS
from vllm_echo.errors import EchoConfigError
from vllm_echo.integration.heads import check, loading
from vllm_echo.integration.heads.form import read_form
from vllm_echo.integration.heads.parameters import optional_parameters, required_parameters

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def copy(head: Path, tmp_path: Path) -> Path:
    return shutil.copytree(head, tmp_path / "head")


def serve(target: Path, folder: Path) -> Engine:
    return echo_engine(target, folder, 4, max_num_batched_tokens=4096)


@pytest.fixture
def from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "account", lambda where, tensors, form: None)


def refused(target: Path, folder: Path) -> str:
    with pytest.raises(EchoConfigError) as caught:
        serve(target, folder)
    return str(caught.value)


@pytest.mark.usefixtures("from_the_hub")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (kit.drop("midlayer.self_attn.k_proj.weight"), "no tensor midlayer.self_attn.k_proj"),
        (kit.drop("lm_head.weight"), "no lm_head.weight"),
        (kit.drop("d2t"), "no map d2t"),
        (kit.add("input_norm.weight", 384), "input_norm.weight, which vLLM's model"),
    ],
    ids=["projection", "output layer", "map", "norm"],
)
def test_a_head_that_was_not_looked_at_before_is_accounted_for(
    target: Path, copy: Path, change: Callable[[kit.Tensors], None], expected: str
) -> None:
    assert expected in refused(target, kit.change_tensors(copy, change))


@pytest.mark.usefixtures("from_the_hub")
@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        # Of three projections stored in one parameter one is missing.
        (kit.drop("midlayer.self_attn.k_proj.weight"), "layers.0.self_attn.qkv_proj.weight"),
        (kit.drop("midlayer.mlp.down_proj.weight"), "layers.0.mlp.down_proj.weight"),
        # Norms start as ones: nothing random, and wrong none the less.
        (kit.drop("norm.weight"), "model.norm.weight"),
        (kit.drop("d2t"), "draft_id_to_target_id"),
    ],
    ids=["part", "whole", "norm", "map"],
)
def test_no_parameter_serves_unfilled_whatever_the_lists_know(
    target: Path,
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[kit.Tensors], None],
    parameter: str,
) -> None:
    monkeypatch.setattr(loading, "account", lambda where, tensors, form: None)
    message = refused(target, kit.change_tensors(copy, change))
    assert f"leaves the parameter {parameter}" in message.replace("model.layers", "layers")


def test_a_quantised_layer_without_its_scale_is_refused(target: Path, copy: Path) -> None:
    """What a layer needs beside its weight is known to vLLM's quantisation method only."""
    kit.in_int8(copy)
    kit.change_tensors(copy, kit.drop("midlayer.self_attn.k_proj.weight_scale"))
    assert "self_attn.qkv_proj.weight_scale" in refused(target, copy)


def test_an_output_layer_that_nobody_shares_is_refused(target: Path, copy: Path) -> None:
    """The target's comes after loading: the mark has to be gone by then, and not before."""
    engine = serve(target, FORMS["the target's output layer"](copy))
    model = engine.runner.drafter.model
    loading.refuse_unshared("head", model)
    loading._mark(model.lm_head.weight)
    with pytest.raises(EchoConfigError, match=r"no lm_head\.weight of its own"):
        loading.refuse_unshared("head", model)


# What else a quantised layer has is up to its method.
@pytest.mark.parametrize("form", [form for form in FORMS if "int8" not in form])
def test_the_list_of_parameters_is_that_of_vllms_model(
    target: Path, head: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """`required_parameters` is a belief about vLLM's classes: here they are asked."""
    there: dict[str, tuple[int, ...]] = {}
    fillable = loading._fillable_parameters

    def recorded(model):
        there.update((name, tuple(p.shape)) for name, p in model.named_parameters())
        return fillable(model)

    monkeypatch.setattr(loading, "_fillable_parameters", recorded)
    engine = serve(target, FORMS[form](copy))
    hf_config = engine.runner.speculative_config.draft_model_config.hf_config
    head_form = read_form("", hf_config, quantised=False)
    required, optional = required_parameters(head_form), optional_parameters(head_form)
    expected: dict[str, tuple[int, ...]] = {}
    for name, parameter in (required | optional).items():
        place, rows = as_vllm_names(name), parameter.shape[0]
        if name == "d2t" and not head_form.has_reduced_vocabulary:
            continue
        rows += expected.get(place, (0,))[0]
        expected[place] = (rows, *parameter.shape[1:])
    assert there == expected


def as_vllm_names(name: str) -> str:
    if name == "d2t":
        return "draft_id_to_target_id"
    for part in ("q_proj", "k_proj", "v_proj"):
        name = name.replace(f".{part}.", ".qkv_proj.")
    for part in ("gate_proj", "up_proj"):
        name = name.replace(f".{part}.", ".gate_up_proj.")
    return name if name.startswith("lm_head") else f"model.{name}"
