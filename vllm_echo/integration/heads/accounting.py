# SPDX-License-Identifier: Apache-2.0
"""Every weight accounted for: what vLLM's model of the head will have, against what there is.

vLLM fills a head's parameters with the tensors that it recognises. A parameter without one keeps
what was in memory, a tensor without one is an error deep in a worker or dropped without a word,
depending on its name. Here each of these is one message.
"""

import difflib
import re

from vllm_echo.errors import EchoConfigError
from vllm_echo.integration.heads.files import Tensors
from vllm_echo.integration.heads.form import LAYER_IDS, HeadForm
from vllm_echo.integration.heads.parameters import (
    STORED_TOGETHER,
    Parameter,
    optional_parameters,
    required_parameters,
)
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
QUANTISED_WEIGHTS = ("weight", "weight_packed", "qweight", "W_q")
"""What quantisers call the weight of a linear layer; what else a layer needs differs by method, and
is left to the worker's net."""
SCALES = ("_scale", "_zero_point")
REMEDIES = {
    r"fc_norm\.": 'add "fc_norm": true to its config.json',
    r"input_norm\.": 'add "norm_before_fc": true to its config.json',
    r".*\.[qk]_norm\.": 'set "architectures" to ["Eagle3Qwen3ForCausalLM"] in its config.json',
    r".*\.self_attn\..*\.bias": 'add "attention_bias": true to its config.json',
    r".*\.mlp\..*\.bias": 'add "mlp_bias": true to its config.json',
}
"""For tensors whose switch got lost on the way to config.json."""


def account(where: str, tensors: Tensors, form: HeadForm) -> None:
    """Refuse ``tensors`` that are not those of a head of this ``form``, each fault as one message
    that starts with ``where``."""
    accounts = _Accounts(where, tensors, form)
    accounts.refuse_wrong_number_of_layers()
    accounts.refuse_missing()
    accounts.refuse_unknown()
    accounts.refuse_wrong_shapes()
    accounts.refuse_what_cannot_be_shared()
    check_vocabulary(where, tensors, form)


class _Accounts:
    """Both lists, and what is in one of them only."""

    def __init__(self, where: str, tensors: Tensors, form: HeadForm):
        self.where = where
        self.form = form
        self.spelt = _canonical_names(where, tensors)
        """Name in vLLM's spelling -> in that of the files."""
        self.tensors = {name: tensors[spelt] for name, spelt in self.spelt.items()}
        self.required = self._as_stored(required_parameters(form))
        self.known = self.required | optional_parameters(form)
        self.missing = [name for name in self.required if not self._is_there(name)]
        self.unknown = [name for name in self.tensors if not self._has_a_place(name)]

    def _as_stored(self, required: dict[str, Parameter]) -> dict[str, Parameter]:
        """``required`` with one name for several where the files have those stored together."""
        for name in self.tensors:
            prefix, stem, kind = _split(name)
            parts = [f"{prefix}{part}.{kind}" for part in STORED_TOGETHER.get(stem, ())]
            if parts and all(part in required for part in parts):
                removed = [required.pop(part) for part in parts]
                rows = sum(parameter.shape[0] for parameter in removed)
                required[name] = Parameter((rows, *removed[0].shape[1:]), removed[0].key)
        return required

    def _is_there(self, name: str) -> bool:
        if name in self.tensors:
            return True
        prefix, stem, kind = _split(name)
        names = [f"{prefix}{stem}.{other}" for other in QUANTISED_WEIGHTS]
        return self.form.quantised and kind == "weight" and any(n in self.tensors for n in names)

    def _has_a_place(self, name: str) -> bool:
        if name in self.known or any(part in name for part in HARMLESS):
            return True
        if name.startswith("fc.") and not self.form.uses_aux_layers:
            return True  # switched off by a key of its own; the worker says that it is left out
        belongs = any(name.startswith(known.removesuffix("weight")) for known in self.known)
        if self.form.quantised and (belongs or name.endswith(SCALES)):
            return True
        # Some exporters write a bias of zeros for every linear layer.
        return belongs and name.endswith(".bias") and not bool(self.tensors[name].any())

    def refuse_wrong_number_of_layers(self) -> None:
        """A whole layer too few or too many is a matter of ``num_hidden_layers``."""
        wanted, missing = self.form.num_hidden_layers, set(self.missing)
        counted = f"{self.where} has num_hidden_layers {wanted} in its config.json, but"
        more = [name for name in self.unknown if (_layer_of(name) or 0) >= wanted]
        if more and not missing:
            stored = 1 + max(_layer_of(name) or 0 for name in more)
            raise EchoConfigError(
                f"{counted} also {self.spelt[more[0]]}; set num_hidden_layers to {stored}"
            )
        for layer in range(1, wanted):
            names = [name for name in self.required if _layer_of(name) == layer]
            if missing.issuperset(names) and not more:
                raise EchoConfigError(
                    f"{counted} no tensor {names[0]} nor any other of that layer; set "
                    f"num_hidden_layers to {layer}"
                )

    def refuse_missing(self) -> None:
        if not self.missing:
            return
        key = self.required[self.missing[0]].key
        shown = self._in_the_files_spelling(self.missing)
        similar = difflib.get_close_matches(shown[0], [self.spelt[n] for n in self.unknown], n=1)
        asked = f", which its config.json asks for ({key})" if key else ""
        remedy = "export the head again with all of its weights"
        if key:
            remedy = f"export the head again, or correct {key}"
        if similar:
            remedy = f"its {similar[0]} may be meant: rename it"
        raise EchoConfigError(f"{self.where} has no tensor {_some(shown)}{asked}; {remedy}")

    def refuse_unknown(self) -> None:
        if not self.unknown:
            return
        remedy = "rename it, or export the head again without it"
        for pattern, known_remedy in REMEDIES.items():
            if re.match(pattern, self.unknown[0]):
                remedy = f"{known_remedy} if the head was trained so"
                break
        names = _some([self.spelt[name] for name in self.unknown])
        raise EchoConfigError(
            f"{self.where} has {names}, which vLLM's model of it would not read; {remedy}"
        )

    def refuse_wrong_shapes(self) -> None:
        for name, tensor in self.tensors.items():
            if name not in self.known or name == "d2t":
                continue
            if not tensor.is_floating_point() or tensor.element_size() == 1:
                if self.form.quantised:
                    continue
                raise EchoConfigError(
                    f"{self.where} has {self.spelt[name]} of type {tensor.dtype}, but no "
                    "quantization_config in its config.json that says how to read it; export the "
                    "head again"
                )
            if tuple(tensor.shape) != self.known[name].shape:
                raise EchoConfigError(self._wrong_shape(name))
        fc = self.tensors.get("fc.weight")
        if self.form.column_order is not None and (fc is None or not fc.is_floating_point()):
            raise EchoConfigError(
                f"{self.where} has {LAYER_IDS} {list(self.form.layer_ids or ())}, which do not "
                "ascend, and a quantised fc, whose columns cannot be put in order; quantise the "
                "head again without fc"
            )

    def _wrong_shape(self, name: str) -> str:
        shape, form = list(self.tensors[name].shape), self.form
        found = f"{self.where} has {self.spelt[name]} of shape {shape}"
        if name == "fc.weight" and len(shape) == 2 and shape[1] % form.target_hidden_size == 0:
            num_layers = shape[1] // form.target_hidden_size
            if form.layer_ids is None:
                return (
                    f"{found}, which reads {num_layers} layers, and its config.json does not say "
                    f"which; add {LAYER_IDS} with the {num_layers} that it was trained on"
                )
            if num_layers != form.num_aux_layers:
                return (
                    f"{found}, which reads {num_layers} layers, but {LAYER_IDS} "
                    f"{list(form.layer_ids)} names {form.num_aux_layers}; correct the list"
                )
        return (
            f"{found}, but its config.json asks for {list(self.known[name].shape)}; correct "
            "config.json, or export the head again"
        )

    def refuse_what_cannot_be_shared(self) -> None:
        """Only a head as wide as the target may do without embeddings and output layer."""
        form = self.form
        for name in ("embed_tokens.weight", "lm_head.weight"):
            if form.hidden_size != form.target_hidden_size and not self._is_there(name):
                raise EchoConfigError(
                    f"{self.where} is {form.hidden_size} wide and the served model "
                    f"{form.target_hidden_size}, so it needs an {name} of its own; export the head "
                    "again"
                )

    def _in_the_files_spelling(self, names: list[str]) -> list[str]:
        if not any(spelt.startswith("midlayer.") for spelt in self.spelt.values()):
            return names
        return [name.replace("layers.0.", "midlayer.", 1) for name in names]


def _canonical_names(where: str, tensors: Tensors) -> dict[str, str]:
    """Name as vLLM's mapper makes it -> name in the files."""
    spelt: dict[str, str] = {}
    for name in tensors:
        if name.startswith("model."):
            raise EchoConfigError(
                f"{where} has its tensors under names with a prefix ({name}), which vLLM puts "
                'before them itself; take "model." off the names'
            )
        canonical = name.replace("midlayer.", "layers.0.", 1)
        if canonical in spelt:
            raise EchoConfigError(
                f"{where} has {spelt[canonical]} and {name}, which are one parameter to vLLM; "
                "export the head again with one of them"
            )
        spelt[canonical] = name
    return spelt


def _split(name: str) -> tuple[str, str, str]:
    """ "layers.3.mlp.up_proj.weight" -> ("layers.3.", "mlp.up_proj", "weight")."""
    prefix = match.group() if (match := re.match(r"layers\.\d+\.", name)) else ""
    stem, _, kind = name.removeprefix(prefix).rpartition(".")
    return prefix, stem, kind


def _layer_of(name: str) -> int | None:
    match = re.match(r"layers\.(\d+)\.", name)
    return int(match.group(1)) if match else None


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:2])
    return shown if len(names) < 3 else f"{shown} and {len(names) - 2} more"
