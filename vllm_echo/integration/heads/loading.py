# SPDX-License-Identifier: Apache-2.0
"""A head's weights on their way into vLLM's model of it, in the worker.

What vLLM's loader cannot do is done here: columns in another order than the target's layers, and a
map of the full vocabulary. And the last net is here: parameters are marked before they are filled,
and none may keep its mark, so that no head of whatever kind or source serves memory that nobody
wrote.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import SpeculativeConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.utils import get_model_cls

from vllm_echo.errors import EchoConfigError
from vllm_echo.integration.heads.accounting import account
from vllm_echo.integration.heads.files import Tensors
from vllm_echo.integration.heads.form import LAYER_IDS, HeadForm, read_form
from vllm_echo.integration.log import echo_logger

logger = echo_logger(__name__)

SHARED = ("lm_head.weight", "model.embed_tokens.weight")
"""vLLM replaces these by the target's when the files have none; after loading, that is."""
UNUSED = ".hidden_norm.weight"
"""Read in the first layer only; others have one that no file fills."""
FROM_CONFIG = ".input_scale_ub"
"""The one parameter of quantised layers that vLLM takes from the configuration."""

# Type -> (type of the same size, bits that no conversion and no arithmetic yields: NaNs with
# a payload; for ids a number far below all).
_MARKS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float32: (torch.int32, 0x7FC5EC40),
    torch.bfloat16: (torch.int16, 0x7FC5),
    torch.float16: (torch.int16, 0x7E5C),
    torch.int64: (torch.int64, torch.iinfo(torch.int64).min),
}


@contextmanager
def accounted_loading(speculative_config: SpeculativeConfig) -> Iterator[None]:
    """While this is open, vLLM's class of the configured head loads its weights through us.

    Raises EchoConfigError, out of the load, for weights that are not those of the head.
    """
    draft = speculative_config.draft_model_config
    where = f"model: the head {draft.model!r}"
    form = read_form(where, draft.hf_config, quantised=draft.quantization is not None)
    if form.uses_aux_layers:
        draft.hf_config.num_aux_hidden_states = form.num_aux_layers
    model_cls: Any = get_model_cls(draft)
    plain_load_weights = model_cls.load_weights

    def load_weights(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        tensors: Tensors = {}
        for name, tensor in weights:
            if name in tensors:
                raise EchoConfigError(f"{where} has {name} twice; remove one of its files")
            tensors[name] = tensor
        account(where, tensors, form)
        if not form.uses_aux_layers and any(name.startswith("fc.") for name in tensors):
            logger.warning_once("ECHO: the head's fc is left out (use_aux_hidden_state false).")
        for _, parameter in _fillable_parameters(model):
            _mark(parameter)
        loaded = plain_load_weights(model, as_vllm_takes_them(tensors, form).items())
        for name, parameter in _fillable_parameters(model):
            if name not in SHARED and _keeps_mark(parameter):
                raise EchoConfigError(
                    f"{where} leaves the parameter {name} of {type(model).__name__} unfilled, in "
                    "part or as a whole; export the head again with all of its weights"
                )
        return loaded

    model_cls.load_weights = load_weights
    try:
        yield
    finally:
        model_cls.load_weights = plain_load_weights


def refuse_unshared(name: str, model: torch.nn.Module) -> None:
    """After vLLM has shared the target's embeddings and output layer with the head ``model``:
    refuse one that was to be shared and was not."""
    for parameter_name, parameter in model.named_parameters():
        # What is shared is filled by nobody, so the first row tells.
        if parameter_name in SHARED and parameter.numel() and _keeps_mark(parameter[:1]):
            raise EchoConfigError(
                f"model: the head {name!r} has no {parameter_name} of its own, and the served "
                "model has none that it could share; export the head again with it"
            )


def as_vllm_takes_them(tensors: Tensors, form: HeadForm) -> Tensors:
    """``tensors`` as vLLM's model of the head reads them.

    States come in the order of the target's layers, so columns and norms that were trained in
    another order move; and a model of the full vocabulary has no place for a ``d2t``.
    """
    taken = dict(tensors)
    if not form.has_reduced_vocabulary:
        taken.pop("d2t", None)
    order = form.column_order
    if order is None:
        return taken
    width, index = form.target_hidden_size, list(order)
    if "fc.weight" in taken:
        columns = taken["fc.weight"].unflatten(1, (len(order), width))
        taken["fc.weight"] = columns[:, index].flatten(1)
    if "input_norm.weight" in taken:
        taken["input_norm.weight"] = taken["input_norm.weight"].view(-1, width)[index].flatten()
    for place, source in enumerate(order):
        if f"fc_norm.{source}.weight" in tensors:
            taken[f"fc_norm.{place}.weight"] = tensors[f"fc_norm.{source}.weight"]
    return taken


def report_layers(speculative_config: SpeculativeConfig, target_model: Any) -> None:
    """One line in the log where the layers that the head reads are not simply those it names."""
    draft = speculative_config.draft_model_config
    form = read_form("", draft.hf_config, quantised=draft.quantization is not None)
    if not form.uses_aux_layers:
        return
    if form.layer_ids is None:
        logger.warning_once(
            "ECHO: the head's config.json does not say which layers it was trained on; guessed: "
            "%s. If the head hardly agrees with the model, name the right ones there (%s).",
            str(list(target_model.get_eagle3_default_aux_hidden_state_layers())),
            LAYER_IDS,
            scope="global",
        )
    elif form.column_order is not None:
        logger.info_once(
            "ECHO: the head has %s %s, and vLLM hands the states out from below; its columns are "
            "put in that order.",
            LAYER_IDS,
            str(list(form.layer_ids)),
            scope="global",
        )


def _fillable_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that have to come from the files and can be marked. The scales of an attention
    layer's cache have defaults, and what lies on "meta" is not there yet."""
    for prefix, module in model.named_modules():
        if isinstance(module, Attention):
            continue
        for name, parameter in module.named_parameters(prefix, recurse=False):
            unused = name.endswith(UNUSED) and ".layers.0." not in name
            from_config = name.endswith(FROM_CONFIG)
            if parameter.dtype in _MARKS and not (parameter.is_meta or unused or from_config):
                yield name, parameter


def _mark(parameter: torch.nn.Parameter) -> None:
    bits, mark = _MARKS[parameter.dtype]
    parameter.data.view(bits).fill_(mark)


def _keeps_mark(parameter: torch.Tensor) -> bool:
    if parameter.dtype not in _MARKS:
        return False
    bits, mark = _MARKS[parameter.dtype]
    return bool((parameter.data.view(bits) == mark).any())
