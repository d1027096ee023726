# SPDX-License-Identifier: Apache-2.0
"""Every weight accounted for: what vLLM's model of the head will have, against what there is.

vLLM fills a head's parameters with the tensors that it recognises. A parameter without one keeps
what was in memory, a tensor without one is an error deep in a worker or dropped without a word,
depending on its name. Here each of these is one message, from the same rules that vLLM renames by.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_echo.errors import EchoConfigError
from vllm_echo.integration.heads.files import Tensors
from vllm_echo.integration.heads.form import LAYER_IDS, HeadForm
from vllm_echo.integration.heads.vocabulary import check_vocabulary

# Tensors that nothing reads: vLLM computes rotary tables itself, and says in its log that it skips
# the state of masked positions (for parallel drafting). t2d is the inverse of d2t.
HARMLESS = (
    "t2d",
    "mask_hidden",
    "rotary_emb.inv_freq",
    "rotary_pos_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)
SHARED = {"embed_tokens.weight", "lm_head.weight"}
"""Taken from the target where the head has none of its own."""
STORED_TOGETHER = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""vLLM has these as one parameter, and takes them from a file in either form."""
SCALES = ("_scale", "_zero_point")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """A tensor that a head must or may have."""

    shape: Shape
    key: str | None = None
    """The key of config.json that asks for it."""


def required_parameters(form: HeadForm) -> dict[str, Parameter]:
    """Name in the files, with ``layers.0`` for ``midlayer``, -> what vLLM reads there."""
    hidden, wide = form.hidden_size, form.target_hidden_size * form.num_aux_layers
    parameters = {"norm.weight": Parameter((hidden,))}
    if form.uses_aux_layers:
        parameters["fc.weight"] = Parameter((hidden, wide))
    if form.uses_aux_layers and form.norm_before_fc:
        parameters["input_norm.weight"] = Parameter((wide,), "norm_before_fc")
    if form.uses_aux_layers and form.fc_norm:
        for index in range(form.num_aux_layers):
            name = f"fc_norm.{index}.weight"
            parameters[name] = Parameter((form.target_hidden_size,), "fc_norm")
    for layer in range(form.num_hidden_layers):
        key = "num_hidden_layers" if layer else None
        for name, parameter in _layer_parameters(form, layer).items():
            parameters[f"layers.{layer}.{name}"] = Parameter(parameter.shape, parameter.key or key)
    return parameters


def _layer_parameters(form: HeadForm, layer: int) -> dict[str, Parameter]:
    hidden, ffn = form.hidden_size, form.intermediate_size
    queries = form.num_attention_heads * form.head_dim
    keys = form.num_key_value_heads * form.head_dim
    # The first layer reads the token's embedding beside the hidden state.
    inputs = hidden if layer else 2 * hidden
    linears = {
        "self_attn.q_proj": (queries, inputs, form.qkv_bias and "attention_bias"),
        "self_attn.k_proj": (keys, inputs, form.qkv_bias and "attention_bias"),
        "self_attn.v_proj": (keys, inputs, form.qkv_bias and "attention_bias"),
        "self_attn.o_proj": (hidden, queries, form.output_bias and "attention_bias"),
        "mlp.gate_proj": (ffn, hidden, form.mlp_bias and "mlp_bias"),
        "mlp.up_proj": (ffn, hidden, form.mlp_bias and "mlp_bias"),
        "mlp.down_proj": (hidden, ffn, form.mlp_bias and "mlp_bias"),
    }
    parameters = {}
    for name, (outputs, columns, bias_key) in linears.items():
        parameters[f"{name}.weight"] = Parameter((outputs, columns))
        if bias_key:
            parameters[f"{name}.bias"] = Parameter((outputs,), bias_key)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if layer == 0:
        norms.append("hidden_norm")  # other layers have one, and do not use it
    for name in norms:
        parameters[f"{name}.weight"] = Parameter((hidden,))
    if form.query_key_norm:
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            parameters[f"{name}.weight"] = Parameter((form.head_dim,), "architectures")
    return parameters


def optional_parameters(form: HeadForm) -> dict[str, Parameter]:
    """What a head may have beside the required ones."""
    hidden = form.hidden_size
    parameters = {
        "embed_tokens.weight": Parameter((form.vocab_size, hidden)),
        "lm_head.weight": Parameter((form.draft_vocab_size, hidden)),
        "d2t": Parameter((form.draft_vocab_size,)),
    }
    for layer in range(1, form.num_hidden_layers):
        parameters[f"layers.{layer}.hidden_norm.weight"] = Parameter((hidden,))
    return parameters


def account(where: str, tensors: Tensors, form: HeadForm) -> None:
    """Refuse ``tensors`` that are not those of a head of this ``form``, each as one message that
    starts with ``where``."""
    _refuse_prefixes(where, tensors)
    spelt = _canonical_names(where, tensors)
    required = _as_stored(required_parameters(form), spelt)
    known = required | optional_parameters(form)
    missing = [name for name in required if not _is_there(name, spelt, form)]
    unknown = [
        name
        for name in spelt
        if name not in known and not _is_harmless(name, tensors[spelt[name]], known, form)
    ]
    _refuse_wrong_layers(where, form, missing, unknown)
    if missing:
        _refuse_missing(where, form, missing, [spelt[name] for name in unknown], required, spelt)
    if unknown:
        raise EchoConfigError(
            f"{where} has {_some([spelt[name] for name in unknown])}, which vLLM's model of it "
            f"would not read: {_remedy_for_unknown(unknown[0])}"
        )
    _check_shapes(where, {name: tensors[file_name] for name, file_name in spelt.items()}, form)
    check_vocabulary(where, tensors, form)


def _refuse_prefixes(where: str, tensors: Tensors) -> None:
    for name in tensors:
        if name.startswith("model."):
            raise EchoConfigError(
                f"{where} has its tensors under names with a prefix ({name}), which vLLM puts "
                f'before them itself; take "model." off the names'
            )


def _canonical_names(where: str, tensors: Tensors) -> dict[str, str]:
    """Name as vLLM's mapper makes it -> name in the files."""
    spelt: dict[str, str] = {}
    for name in tensors:
        canonical = name.replace("midlayer.", "layers.0.", 1)
        if canonical in spelt:
            raise EchoConfigError(
                f"{where} has {spelt[canonical]} and {name}, which are one parameter to vLLM; "
                "export the head again with one of them"
            )
        spelt[canonical] = name
    return spelt


def _as_stored(required: dict[str, Parameter], spelt: Iterable[str]) -> dict[str, Parameter]:
    """``required`` with one name for several where the files have them stored together."""
    parameters = dict(required)
    for name in spelt:
        stem, _, kind = name.rpartition(".")
        prefix, _, tail = _split_layer(stem)
        names = [f"{prefix}{part}.{kind}" for part in STORED_TOGETHER.get(tail, ())]
        if not names or not all(part in parameters for part in names):
            continue
        parts = [parameters.pop(part) for part in names]
        rows = sum(part.shape[0] for part in parts)
        parameters[name] = Parameter((rows, *parts[0].shape[1:]), parts[0].key)
    return parameters


def _split_layer(name: str) -> tuple[str, int | None, str]:
    """ "layers.3.mlp.up_proj" -> ("layers.3.", 3, "mlp.up_proj")."""
    match = re.match(r"layers\.(\d+)\.", name)
    if match is None:
        return "", None, name
    return match.group(), int(match.group(1)), name[match.end() :]


def _is_there(name: str, spelt: dict[str, str], form: HeadForm) -> bool:
    if name in spelt:
        return True
    stem = name.removesuffix("weight")
    return form.quantised and any(other.startswith(stem) for other in spelt)


def _is_harmless(name: str, tensor: object, known: dict[str, Parameter], form: HeadForm) -> bool:
    if any(part in name for part in HARMLESS):
        return True
    stem = name.rpartition(".")[0]
    belongs = f"{stem}.weight" in known
    if form.quantised and (belongs or name.endswith(SCALES)):
        return True
    # Some exporters write a bias of zeros for every linear layer; without it nothing changes.
    return belongs and name.endswith(".bias") and not bool(tensor.any())  # type: ignore[attr-defined]


def _refuse_wrong_layers(
    where: str, form: HeadForm, missing: list[str], unknown: list[str]
) -> None:
    """A whole layer too few or too many is a matter of ``num_hidden_layers``."""
    wanted = form.num_hidden_layers
    too_many = sorted({n for n in map(_layer_of, unknown) if n is not None and n >= wanted})
    lacking = {n for n in map(_layer_of, missing) if n}
    absent = sorted(
        layer
        for layer in lacking
        if {name for name in required_parameters(form) if _layer_of(name) == layer} <= set(missing)
    )
    if absent and not too_many:
        raise EchoConfigError(
            f"{where} has num_hidden_layers {wanted} in its config.json, but no tensor "
            f"layers.{absent[0]}.self_attn.q_proj.weight nor any other of that layer; set "
            f"num_hidden_layers to {absent[0]}"
        )
    if too_many and not missing:
        first = next(name for name in unknown if _layer_of(name) == too_many[0])
        raise EchoConfigError(
            f"{where} has num_hidden_layers {wanted} in its config.json, but also {first}; set "
            f"num_hidden_layers to {too_many[-1] + 1}"
        )


def _layer_of(name: str) -> int | None:
    return _split_layer(name)[1]


def _refuse_missing(
    where: str,
    form: HeadForm,
    missing: list[str],
    unknown: list[str],
    required: dict[str, Parameter],
    spelt: dict[str, str],
) -> None:
    old_style = any(name.startswith("midlayer.") for name in spelt.values())
    shown = [name.replace("layers.0.", "midlayer.", 1) if old_style else name for name in missing]
    key = required[missing[0]].key
    asked = f", which its config.json asks for ({key} {_value(form, key)})" if key else ""
    similar = difflib.get_close_matches(shown[0], unknown, n=1)
    if similar:
        remedy = f"its {similar[0]} may be meant: rename it"
    elif key:
        remedy = f"export the head again, or correct {key}"
    else:
        remedy = "export the head again with all of its weights"
    raise EchoConfigError(f"{where} has no tensor {_some(shown)}{asked}; {remedy}")


def _value(form: HeadForm, key: str) -> str:
    if key == "num_hidden_layers":
        return str(form.num_hidden_layers)
    return "Eagle3Qwen3ForCausalLM" if key == "architectures" else "true"


def _remedy_for_unknown(name: str) -> str:
    remedies = {
        "fc_norm.": 'add "fc_norm": true to its config.json',
        "input_norm.": 'add "norm_before_fc": true to its config.json',
        "fc.": "its config.json says use_aux_hidden_state false; correct that",
        ".q_norm.": 'set "architectures" to ["Eagle3Qwen3ForCausalLM"] in its config.json',
        ".k_norm.": 'set "architectures" to ["Eagle3Qwen3ForCausalLM"] in its config.json',
    }
    for part, remedy in remedies.items():
        if name.startswith(part) or (part.startswith(".") and part in name):
            return remedy
    if name.endswith(".bias"):
        key = "mlp_bias" if ".mlp." in name else "attention_bias"
        return f'add "{key}": true to its config.json if the head was trained so'
    return "rename it, or export the head again without it"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:2])
    return shown if len(names) < 3 else f"{shown} and {len(names) - 2} more"


def _check_shapes(where: str, tensors: Tensors, form: HeadForm) -> None:
    parameters = _as_stored(required_parameters(form), tensors) | optional_parameters(form)
    for name, parameter in parameters.items():
        if name not in tensors or name == "d2t":
            continue
        tensor = tensors[name]
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            if form.quantised:
                continue
            raise EchoConfigError(
                f"{where} has {name} of type {tensor.dtype}, but no quantization_config in its "
                "config.json that says how to read it; export the head again"
            )
        if tuple(tensor.shape) != parameter.shape:
            raise EchoConfigError(_wrong_shape(where, name, tuple(tensor.shape), parameter, form))
    _check_shared(where, tensors, form)
    fc = tensors.get("fc.weight")
    if form.column_order is not None and (fc is None or not fc.is_floating_point()):
        raise EchoConfigError(
            f"{where} has {LAYER_IDS} {list(form.layer_ids or ())}, which do not ascend, and a "
            "quantised fc, whose columns cannot be put in order; quantise the head again without fc"
        )


def _wrong_shape(where: str, name: str, shape: Shape, parameter: Parameter, form: HeadForm) -> str:
    found = f"{where} has {name} of shape {list(shape)}"
    if name == "fc.weight" and len(shape) == 2 and shape[0] == form.hidden_size:
        num_layers, rest = divmod(shape[1], form.target_hidden_size)
        if not rest and form.layer_ids is None:
            return (
                f"{found}, which reads {num_layers} layers, and its config.json does not say "
                f"which; add {LAYER_IDS} with the {num_layers} that it was trained on"
            )
        if not rest and form.layer_ids is not None:
            return (
                f"{found}, which reads {num_layers} layers, but {LAYER_IDS} "
                f"{list(form.layer_ids)} names {len(form.layer_ids)}; correct the list"
            )
    return (
        f"{found}, but its config.json asks for {list(parameter.shape)}; export the head again, "
        "or correct its config.json"
    )


def _check_shared(where: str, tensors: Tensors, form: HeadForm) -> None:
    """A head as wide as the target may go without embeddings and output layer of its own."""
    if form.hidden_size == form.target_hidden_size:
        return
    for name in sorted(SHARED):
        if not any(other.startswith(name.removesuffix("weight")) for other in tensors):
            raise EchoConfigError(
                f"{where} is {form.hidden_size} wide and the served model "
                f"{form.target_hidden_size}, so it needs an {name} of its own; export the head "
                "again"
            )
