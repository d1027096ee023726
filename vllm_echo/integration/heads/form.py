# SPDX-License-Identifier: Apache-2.0
"""What a head is, by its configuration: read as vLLM's EAGLE-3 model classes read it.

Two classes of vLLM stand behind all architectures, ``models/llama_eagle3.py`` and
``models/qwen3_eagle3.py``. They differ in the norms of queries and keys, in biases, and in the keys
that count layers.
"""

from dataclasses import dataclass, fields
from typing import Any

from vllm_echo.errors import EchoConfigError
from vllm_echo.integration.compat import (
    AMBIGUOUS_ARCHITECTURES,
    DEFAULT_NUM_AUX_HIDDEN_STATES,
    EAGLE3_ARCHITECTURES,
    QWEN3_EAGLE3_ARCHITECTURES,
)

MAKE_ONE = "give an EAGLE-3 head that was trained for the served model"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE3_MARKS = ("draft_vocab_size", "eagle_config", LAYER_IDS)


@dataclass(frozen=True)
class HeadForm:
    """The sizes and switches that decide which parameters vLLM's model of the head will have."""

    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_aux_layers: int
    """States of the target's layers that ``fc`` takes side by side."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    layer_ids: tuple[int, ...] | None
    """The target's layers in the order in which ``fc`` has their columns; None: not said."""
    uses_aux_layers: bool
    norm_before_fc: bool
    fc_norm: bool
    query_key_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    quantised: bool
    """Linear layers are stored in a form of their own; only their presence can be judged."""

    @property
    def column_order(self) -> tuple[int, ...] | None:
        """``order[i]``: which of the head's columns belong to the i-th layer from below, as vLLM
        hands states out; None where they lie in that order already."""
        if self.layer_ids is None:
            return None
        order = tuple(sorted(range(len(self.layer_ids)), key=self.layer_ids.__getitem__))
        return None if order == tuple(range(len(order))) else order

    @property
    def has_reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size != self.vocab_size


def read_form(where: str, hf_config: Any, quantised: bool) -> HeadForm:
    """The form of the head ``where`` (the start of every message) by its configuration."""
    is_qwen3 = _architecture(where, hf_config) in QWEN3_EAGLE3_ARCHITECTURES

    def read(key: str, default: Any = None) -> Any:
        return getattr(hf_config, key, default)

    eagle_config = read("eagle_config") or {}
    layer_ids = _layer_ids(where, read(LAYER_IDS) or eagle_config.get(LAYER_IDS))
    uses_aux_layers = bool(eagle_config.get("use_aux_hidden_state", True))
    hidden_size, num_heads = read("hidden_size"), read("num_attention_heads")
    draft_vocab_size, attention_bias = read("draft_vocab_size"), bool(read("attention_bias", False))
    form = HeadForm(
        hidden_size=hidden_size,
        target_hidden_size=read("target_hidden_size", hidden_size),
        vocab_size=read("vocab_size"),
        draft_vocab_size=read("vocab_size") if draft_vocab_size is None else draft_vocab_size,
        num_aux_layers=_num_aux_layers(where, hf_config, is_qwen3, layer_ids),
        num_hidden_layers=read("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=read("num_key_value_heads", num_heads),
        head_dim=read("head_dim") or _quotient(hidden_size, num_heads),
        intermediate_size=read("intermediate_size"),
        layer_ids=layer_ids if uses_aux_layers else None,
        uses_aux_layers=uses_aux_layers,
        norm_before_fc=bool(eagle_config.get("norm_before_fc", read("norm_before_fc", False))),
        fc_norm=bool(read("fc_norm", False)),
        query_key_norm=is_qwen3,
        qkv_bias=attention_bias,
        output_bias=not is_qwen3 and (attention_bias or bool(read("bias", False))),
        mlp_bias=not is_qwen3 and bool(read("mlp_bias", False)),
        quantised=quantised,
    )
    for field in fields(form):
        value = getattr(form, field.name)
        if field.type is int and (not isinstance(value, int) or value <= 0):
            raise EchoConfigError(
                f"{where} has {field.name} {value!r} in its config.json; {MAKE_ONE}"
            )
    if read("hidden_act") != "silu":
        raise EchoConfigError(
            f"{where} has hidden_act {read('hidden_act')!r} in its config.json, and vLLM's EAGLE-3 "
            f'heads have "silu" only; {MAKE_ONE}'
        )
    return form


def _architecture(where: str, hf_config: Any) -> str:
    names = list(hf_config.architectures or [])
    for name in names:
        marked = name.startswith("Eagle3") or name.endswith("Eagle3")
        full_name = name if marked else f"Eagle3{name}"
        ambiguous = name in AMBIGUOUS_ARCHITECTURES
        if full_name in EAGLE3_ARCHITECTURES and (not ambiguous or _has_marks(hf_config)):
            return full_name
    raise EchoConfigError(
        f"{where} is no EAGLE-3 head that vLLM knows (architectures {names}); {MAKE_ONE}, such as "
        f"{EAGLE3_ARCHITECTURES[0]}"
    )


def _has_marks(hf_config: Any) -> bool:
    """A head often carries its base model's architecture; only a head has these keys."""
    return any(getattr(hf_config, key, None) is not None for key in EAGLE3_MARKS)


def _layer_ids(where: str, layer_ids: Any) -> tuple[int, ...] | None:
    if not layer_ids:
        return None
    if not isinstance(layer_ids, (list, tuple)):
        raise EchoConfigError(
            f"{where} has {LAYER_IDS} {layer_ids!r}, which is no list; give the numbers of the "
            "layers that the head was trained on"
        )
    return tuple(layer_ids)


def _num_aux_layers(
    where: str, hf_config: Any, is_qwen3: bool, layer_ids: tuple[int, ...] | None
) -> int:
    """How many layers the head reads: by the key that counts them, or by their ids.

    vLLM's Llama class takes no count from ids at the top level, and would build an ``fc`` for
    three; ``loading`` tells it what is returned here.
    """
    keys = ("num_aux_layers", "num_aux_hidden_states") if is_qwen3 else ("num_aux_hidden_states",)
    for key in keys:
        count = getattr(hf_config, key, None)
        if count is None:
            continue
        if layer_ids is not None and count != len(layer_ids):
            raise EchoConfigError(
                f"{where} has {LAYER_IDS} {list(layer_ids)}, but reads {count} layers ({key}); "
                "correct the one that is wrong"
            )
        if layer_ids is None and count != DEFAULT_NUM_AUX_HIDDEN_STATES:
            raise EchoConfigError(
                f"{where} reads {count!r} layers ({key}), and its config.json does not say which; "
                f"add {LAYER_IDS} with the layers that it was trained on (without it vLLM hands "
                f"out {DEFAULT_NUM_AUX_HIDDEN_STATES})"
            )
        return count
    return len(layer_ids) if layer_ids else DEFAULT_NUM_AUX_HIDDEN_STATES


def _quotient(size: Any, parts: Any) -> int:
    both = isinstance(size, int) and isinstance(parts, int) and parts > 0
    return size // parts if both else 0
