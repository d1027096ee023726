# SPDX-License-Identifier: Apache-2.0
"""Does the draft head fit the model that is served?

vLLM would find most misfits only while it loads weights, as a shape error deep in a worker process,
and some never (a missing vocabulary map). Here each is one message at start-up. The configuration
is judged wherever the head comes from; tensors only when they lie in a local folder.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_echo.core.config import EchoConfig
from vllm_echo.errors import EchoConfigError
from vllm_echo.integration.compat import (
    AMBIGUOUS_ARCHITECTURES,
    DEFAULT_NUM_AUX_HIDDEN_STATES,
    EAGLE3_ARCHITECTURES,
)
from vllm_echo.integration.head_tensors import check_tensors

if TYPE_CHECKING:
    from vllm.config import ModelConfig

MAKE_ONE = "give an EAGLE-3 head that was trained for the served model"
EAGLE3_MARKS = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")


@dataclass(frozen=True)
class HeadShape:
    """The sizes that have to agree, as vLLM's EAGLE-3 model reads them from a configuration."""

    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_aux_hidden_states: int
    uses_aux_hidden_states: bool


def check_head(raw: dict[str, Any], config: EchoConfig, target: "ModelConfig") -> str:
    """Refuse a head that is missing or misfits; returns the name under which vLLM finds it.

    `raw` is the user's speculative configuration with its keys normalised.
    """
    name = raw["model"]
    folder = _local_folder(name)
    hf_config = _load_config(folder or name, raw, target)
    where = f"model: the head {name!r}"
    _check_architecture(where, hf_config)
    shape = _read_shape(where, hf_config, target.get_vocab_size())
    _check_sizes(where, shape, target)
    _check_aux_layers(where, hf_config, shape, target)
    if config.top_k > shape.draft_vocab_size:
        raise EchoConfigError(
            f"echo.top_k: {config.top_k} is more than the head's {shape.draft_vocab_size} tokens; "
            f"lower it to at most {shape.draft_vocab_size}"
        )
    quantised = raw.get("quantization") or getattr(hf_config, "quantization_config", None)
    if folder is not None and not quantised:
        check_tensors(where, folder, shape)
    _check_target(target)
    return str(folder) if folder is not None else name


def _local_folder(name: str) -> Path | None:
    """The head's folder, or None when the name can only be a hub's."""
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        raise EchoConfigError(f"model: the folder {name!r} has no config.json; {MAKE_ONE}")
    if path.exists():
        raise EchoConfigError(f"model: {name!r} is a file; give the folder that holds the head")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 and "://" not in name:
        raise EchoConfigError(f"model: there is no folder {name!r}; {MAKE_ONE}")
    return None


def _load_config(source: Path | str, raw: dict[str, Any], target: "ModelConfig") -> Any:
    """The head's Hugging Face configuration, as vLLM itself will load it."""
    from huggingface_hub.errors import StrictDataclassError
    from vllm.transformers_utils.config import get_config

    if isinstance(source, Path):
        try:
            content = json.loads((source / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EchoConfigError(f"model: {source}/config.json cannot be read ({error})") from None
        if not isinstance(content, dict):
            raise EchoConfigError(f"model: {source}/config.json holds no object; {MAKE_ONE}")
    try:
        return get_config(
            str(source),
            trust_remote_code=target.trust_remote_code,
            revision=raw.get("revision"),
            code_revision=raw.get("code_revision"),
        )
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        cause = str(error.__cause__ or error).strip().splitlines()
        reason = cause[0].strip() if cause else type(error).__name__
        raise EchoConfigError(
            f"model: {str(source)!r} is no folder here, or no configuration could be loaded from "
            f"it ({reason}); {MAKE_ONE}: a folder with config.json, or a name on the model hub"
        ) from None


def _check_architecture(where: str, hf_config: Any) -> None:
    names = list(hf_config.architectures or [])
    for name in names:
        marked = name.startswith("Eagle3") or name.endswith("Eagle3")
        full_name = name if marked else f"Eagle3{name}"
        ambiguous = name in AMBIGUOUS_ARCHITECTURES
        if full_name in EAGLE3_ARCHITECTURES and (not ambiguous or _has_marks(hf_config)):
            return
    raise EchoConfigError(
        f"{where} is no EAGLE-3 head that vLLM knows (architectures {names}); {MAKE_ONE}, such as "
        f"{EAGLE3_ARCHITECTURES[0]}"
    )


def _has_marks(hf_config: Any) -> bool:
    """A head often carries its base model's architecture; only a head has these keys."""
    return any(getattr(hf_config, key, None) is not None for key in EAGLE3_MARKS)


def _read_shape(where: str, hf_config: Any, target_vocab_size: int) -> HeadShape:
    eagle_config = getattr(hf_config, "eagle_config", None) or {}
    num_aux = getattr(hf_config, "num_aux_hidden_states", None)
    if num_aux is None:
        layer_ids = eagle_config.get("eagle_aux_hidden_state_layer_ids")
        num_aux = len(layer_ids) if layer_ids else DEFAULT_NUM_AUX_HIDDEN_STATES
    sizes: dict[str, Any] = {"hidden_size": getattr(hf_config, "hidden_size", None)}
    sizes["target_hidden_size"] = getattr(hf_config, "target_hidden_size", sizes["hidden_size"])
    sizes["vocab_size"] = getattr(hf_config, "vocab_size", None)
    draft_vocab_size = getattr(hf_config, "draft_vocab_size", None)
    sizes["draft_vocab_size"] = (
        sizes["vocab_size"] if draft_vocab_size is None else draft_vocab_size
    )
    sizes["num_aux_hidden_states"] = num_aux
    for key, value in sizes.items():
        if not isinstance(value, int) or value <= 0:
            raise EchoConfigError(f"{where} has {key} {value!r} in its config.json; {MAKE_ONE}")
    uses_aux = eagle_config.get("use_aux_hidden_state", True)
    return HeadShape(**sizes, uses_aux_hidden_states=bool(uses_aux))


def _check_sizes(where: str, shape: HeadShape, target: "ModelConfig") -> None:
    hidden_size, vocab_size = target.get_hidden_size(), target.get_vocab_size()
    if shape.target_hidden_size != hidden_size:
        raise EchoConfigError(
            f"{where} reads hidden states of {shape.target_hidden_size} values, but "
            f"{target.model!r} has {hidden_size}; {MAKE_ONE}"
        )
    if shape.vocab_size != vocab_size:
        raise EchoConfigError(
            f"{where} knows a vocabulary of {shape.vocab_size} tokens, but {target.model!r} has "
            f"{vocab_size}; {MAKE_ONE}"
        )
    if shape.draft_vocab_size > vocab_size:
        raise EchoConfigError(
            f"{where} has draft_vocab_size {shape.draft_vocab_size}, more than the {vocab_size} "
            f"tokens of {target.model!r}; {MAKE_ONE}"
        )


def _check_aux_layers(where: str, hf_config: Any, shape: HeadShape, target: "ModelConfig") -> None:
    if not shape.uses_aux_hidden_states:
        return
    eagle_config = getattr(hf_config, "eagle_config", None) or {}
    layer_ids = getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None)
    layer_ids = layer_ids or eagle_config.get("eagle_aux_hidden_state_layer_ids")
    if not layer_ids:
        return
    num_layers = target.get_total_num_hidden_layers()
    key = "eagle_aux_hidden_state_layer_ids"
    for layer in layer_ids:
        if not isinstance(layer, int) or not 0 <= layer <= num_layers:
            raise EchoConfigError(
                f"{where} has {key} {list(layer_ids)}, but {target.model!r} has layers 0 to "
                f"{num_layers}; {MAKE_ONE}"
            )
    if len(set(layer_ids)) != shape.num_aux_hidden_states:
        raise EchoConfigError(
            f"{where} has {key} {list(layer_ids)}, but reads {shape.num_aux_hidden_states} layers; "
            f"{MAKE_ONE}"
        )


def _check_target(target: "ModelConfig") -> None:
    """The served model must hand out the hidden states of its middle layers."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    model_cls, architecture = target.registry.resolve_model_cls(target.architectures, target)
    if not supports_eagle3(model_cls):
        raise EchoConfigError(
            f"method: echo needs a model that vLLM can serve with EAGLE-3 heads, and "
            f"{architecture} is none of them; serve another model, or leave echo out"
        )
