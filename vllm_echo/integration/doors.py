# SPDX-License-Identifier: Apache-2.0
"""The functions that the patched vLLM calls, one a door. The patches know nothing else of us.

Called while vLLM is being imported: vLLM itself is imported inside the functions only.
"""

import argparse
import difflib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_echo.core.config import (
    METHOD,
    VLLM_KEYS,
    EchoConfig,
    is_echo_request,
    normalise_keys,
    parse_speculative_config,
)
from vllm_echo.errors import EchoConfigError, EchoError
from vllm_echo.integration.compat import CARRIER_METHOD, ECHO_CPU_WORKER, vllm_distribution

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig

    from vllm_echo.integration.metrics import EchoLogging, EchoProm

__all__ = [
    "announce_compiling",
    "choose_worker",
    "cli_speculative_config",
    "echo_logging",
    "echo_prom",
    "finish_loading",
    "is_echo",
    "load_speculative_config",
    "make_speculative_config",
    "offer_echo",
    "processor_factors",
    "run_cli",
    "vllm_distribution",
]

EXIT_USAGE = 2


def run_cli(dispatch: Callable[[argparse.Namespace], Any], args: argparse.Namespace) -> None:
    """Run a `vllm` command; an error of ours ends it with its one message, not a traceback."""
    try:
        dispatch(args)
    except EchoError as error:
        print(f"vllm: error: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def cli_speculative_config(text: str) -> dict[str, Any] | None:
    """argparse type of `--speculative-config`: inline JSON or the path of a JSON file.

    Its keys are judged by `load_speculative_config`, once `--spec-model` and the like are known.
    """
    if text.strip() in ("", "None", "null"):
        return None
    try:
        return parse_speculative_config(text)
    except EchoConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def offer_echo(method_argument: dict[str, Any]) -> dict[str, Any]:
    """Add "echo" to the choices of `--spec-method`; vLLM derives them from its own methods."""
    return {**method_argument, "choices": [*method_argument["choices"], METHOD]}


def load_speculative_config(
    value: Any, spec_model: str | None = None, spec_tokens: int | None = None
) -> Any:
    """Turn a path or inline JSON into a dictionary, and judge it when it asks for echo.

    Everything else is returned as it came. Called as soon as engine arguments exist, so that a
    wrong key is refused before any model is looked at; `spec_model` and `spec_tokens` are vLLM's
    options `--spec-model` and `--spec-tokens`, which it merges in later.
    """
    if isinstance(value, str):
        value = parse_speculative_config(value)
    if not is_echo_request(value):
        _refuse_misspelt_method(value)
        return value
    options = {"model": spec_model, "num_speculative_tokens": spec_tokens}
    merged = {key: option for key, option in options.items() if option is not None}
    EchoConfig.from_speculative_config({**merged, **normalise_keys(value)})
    # The key is there from now on, so that nothing can change the method and drop echo silently.
    return {**value, "echo": value.get("echo") or {}}


def _refuse_misspelt_method(value: Any) -> None:
    """vLLM would answer with its own forty methods, and echo is none of them."""
    method = value.get("method") if isinstance(value, dict) else None
    if isinstance(method, str) and difflib.get_close_matches(method.lower(), [METHOD], cutoff=0.7):
        raise EchoConfigError(f'method: {method!r} is no method; did you mean "{METHOD}"?')


def make_speculative_config(
    value: dict[str, Any],
    target_model_config: "ModelConfig",
    async_scheduling: bool | None = None,
) -> "SpeculativeConfig":
    """vLLM's SpeculativeConfig for what the user wrote. What vLLM refuses of a configuration for
    echo is an EchoConfigError: its own comes out as a traceback."""
    from pydantic import ValidationError
    from vllm.config import SpeculativeConfig

    arguments = normalise_speculative_config(value, target_model_config, async_scheduling)
    try:
        return SpeculativeConfig(**arguments)
    except ValidationError as error:
        if not is_echo_request(value):
            raise
        from vllm_echo.integration.refusals import refused_by_vllm

        raise refused_by_vllm(error) from None


def normalise_speculative_config(
    value: dict[str, Any],
    target_model_config: "ModelConfig",
    async_scheduling: bool | None = None,
) -> dict[str, Any]:
    """The arguments of vLLM's SpeculativeConfig for what the user wrote.

    Other methods pass through untouched. For echo: validate, look at the platform and at the head,
    and hand vLLM an EAGLE-3 configuration that carries our options in its field `echo`.
    """
    if not is_echo_request(value):
        if value.get("echo") is not None:
            EchoConfig.from_speculative_config(value)  # raises: names the method
        return value
    from vllm_echo.integration import refusals
    from vllm_echo.integration.heads.check import check_head

    config = EchoConfig.from_speculative_config(value)
    refusals.check_platform()
    if async_scheduling:
        raise EchoConfigError(
            "async_scheduling: echo decides each step's budget from the step before, so the next "
            "step cannot be scheduled ahead; leave --async-scheduling out"
        )
    raw = normalise_keys(value)
    refusals.check_draft_keys(raw, target_model_config)
    model = check_head(raw, config, target_model_config)
    passed = {key: raw[key] for key in VLLM_KEYS if raw.get(key) is not None}
    engine = {key: raw[key] for key in raw if key.startswith("target_")}
    return {
        **passed,
        **engine,
        "method": CARRIER_METHOD,
        "model": model,
        "num_speculative_tokens": config.num_speculative_tokens,
        "disable_padded_drafter_batch": True,  # trees differ in size; so no padding
        "echo": config.to_dict(),
    }


def is_echo(speculative_config: "SpeculativeConfig | None") -> bool:
    """Does this engine speculate with echo?"""
    return speculative_config is not None and speculative_config.echo is not None


def choose_worker(vllm_config: "VllmConfig") -> str | None:
    """The worker class that serves this configuration; None leaves the choice to vLLM.

    Raises EchoConfigError for what echo cannot serve.
    """
    if not is_echo(vllm_config.speculative_config):
        return None
    from vllm_echo.integration import refusals

    refusals.check_engine(vllm_config)
    return ECHO_CPU_WORKER


def finish_loading(compiled_fn: Any, vllm_config: "VllmConfig") -> None:
    """Let a compiled model that came from vLLM's cache finish loading, where its form has to.

    vLLM's own form holds graphs that its backend still turns into code. What torch's backend saves,
    which compiles a CPU's models, is code already.
    """
    from vllm.compilation.caching import VllmSerializableFunction

    if isinstance(compiled_fn, VllmSerializableFunction):
        compiled_fn.finalize_loading(vllm_config)


def processor_factors() -> list[object]:
    """What a compiled model depends on beside vLLM's own key: on a CPU, its instruction sets.

    Vector widths and vLLM's choice of kernels are part of the compiled code, and a cache folder
    may be shared by machines that differ in both.
    """
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return []
    features = torch.cpu.get_capabilities().items()
    return [sorted(name for name, value in features if value is True)]


def announce_compiling(tag: str, path: str) -> None:
    """Say that the model ``tag`` is about to be compiled, since ``path`` has no such model. vLLM
    says so itself where its own backend compiles."""
    from vllm.platforms import current_platform

    from vllm_echo.integration.log import echo_logger

    if current_platform.is_cpu():
        echo_logger(__name__).info(
            "[%s] compiling, which may take a minute or more: no usable compiled model in %s",
            tag,
            path,
        )


def echo_logging(vllm_config: "VllmConfig") -> "EchoLogging | None":
    """What writes echo's line of the periodic log; None where echo does not speculate."""
    if not is_echo(vllm_config.speculative_config):
        return None
    from vllm_echo.integration.metrics import EchoLogging

    return EchoLogging()


def echo_prom(
    vllm_config: "VllmConfig",
    labelnames: list[str],
    labelvalues: dict[int, list[object]],
    counter_cls: Callable[..., Any],
    histogram_cls: Callable[..., Any],
) -> "EchoProm | None":
    """Echo's Prometheus metrics, one child an engine; None where echo does not speculate."""
    speculative_config = vllm_config.speculative_config
    if speculative_config is None or speculative_config.echo is None:
        return None
    from vllm_echo.integration.metrics import EchoProm

    config = EchoConfig.from_dict(speculative_config.echo)
    return EchoProm(config, labelnames, labelvalues, counter_cls, histogram_cls)
