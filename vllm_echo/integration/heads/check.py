# SPDX-License-Identifier: Apache-2.0
"""Does the draft head fit the model that is served?

vLLM would find most misfits only while it loads weights, as a shape error deep in a worker process,
and some never (a missing vocabulary map). Here each is one message at start-up. The configuration
is judged wherever the head comes from; tensors here when they lie in a local folder, and in the
worker (``loading``) whatever their source.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_echo.core.config import EchoConfig
from vllm_echo.errors import EchoConfigError
from vllm_echo.integration.compat import default_aux_layers
from vllm_echo.integration.heads.accounting import account
from vllm_echo.integration.heads.files import read_tensors
from vllm_echo.integration.heads.form import LAYER_IDS, MAKE_ONE, HeadForm, read_form

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def check_head(raw: dict[str, Any], config: EchoConfig, target: "ModelConfig") -> str:
    """Refuse a head that is missing or misfits; returns the name under which vLLM finds it.

    `raw` is the user's speculative configuration with its keys normalised.
    """
    name = raw["model"]
    folder = _local_folder(name)
    hf_config = _load_config(folder or name, raw, target)
    where = f"model: the head {name!r}"
    quantised = raw.get("quantization") or getattr(hf_config, "quantization_config", None)
    form = read_form(where, hf_config, quantised=bool(quantised))
    _check_sizes(where, form, target)
    _check_layers(where, form, target)
    if config.top_k > form.draft_vocab_size:
        raise EchoConfigError(
            f"echo.top_k: {config.top_k} is more than the head's {form.draft_vocab_size} tokens; "
            f"lower it to at most {form.draft_vocab_size}"
        )
    if folder is not None:
        account(where, read_tensors(where, folder), form)
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
            raise EchoConfigError(
                f"model: {source}/config.json cannot be read ({error}); repair it, or download the "
                "head again"
            ) from None
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


def _check_sizes(where: str, form: HeadForm, target: "ModelConfig") -> None:
    hidden_size, vocab_size = target.get_hidden_size(), target.get_vocab_size()
    if form.target_hidden_size != hidden_size:
        raise EchoConfigError(
            f"{where} reads hidden states of {form.target_hidden_size} values, but "
            f"{target.model!r} has {hidden_size}; {MAKE_ONE}"
        )
    if form.vocab_size != vocab_size:
        raise EchoConfigError(
            f"{where} knows a vocabulary of {form.vocab_size} tokens, but {target.model!r} has "
            f"{vocab_size}; {MAKE_ONE}"
        )
    if form.draft_vocab_size > vocab_size:
        raise EchoConfigError(
            f"{where} has draft_vocab_size {form.draft_vocab_size}, more than the {vocab_size} "
            f"tokens of {target.model!r}; {MAKE_ONE}"
        )


def _check_layers(where: str, form: HeadForm, target: "ModelConfig") -> None:
    """The layers that the head reads have to be there, as many as it reads."""
    num_layers = target.get_total_num_hidden_layers()
    if not form.uses_aux_layers:
        return
    if form.layer_ids is None:
        guess = default_aux_layers(num_layers)
        if len(set(guess)) != len(guess) or min(guess) < 0:
            raise EchoConfigError(
                f"{where} does not say which layers it was trained on, and {target.model!r} has "
                f"too few ({num_layers}) to guess; add {LAYER_IDS} to its config.json"
            )
        return
    for layer in form.layer_ids:
        if not isinstance(layer, int) or not 0 <= layer <= num_layers:
            raise EchoConfigError(
                f"{where} has {LAYER_IDS} {list(form.layer_ids)}, but {target.model!r} has layers "
                f"0 to {num_layers}; {MAKE_ONE}"
            )
    if len(set(form.layer_ids)) != len(form.layer_ids):
        raise EchoConfigError(
            f"{where} has {LAYER_IDS} {list(form.layer_ids)}, which names a layer twice, and vLLM "
            "hands out each once; correct the list"
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
