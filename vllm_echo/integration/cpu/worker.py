# SPDX-License-Identifier: Apache-2.0
"""The worker that serves echo on a CPU: vLLM's own, with our runner and attention."""

from typing import Any
from unittest.mock import patch

from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker import cpu_worker

from vllm_echo.integration.cpu.attention import EchoCPUAttentionBackend
from vllm_echo.integration.cpu.quick_profile import settle_profile
from vllm_echo.integration.cpu.runner import EchoCPUModelRunner


class EchoCPUWorker(cpu_worker.CPUWorker):
    """Chosen by ``doors.choose_worker`` when the speculative config carries echo options."""

    def init_device(self) -> None:
        register_backend(AttentionBackendEnum.CPU_ATTN)(EchoCPUAttentionBackend)
        # An engine that was in this process before us has left its choice in the cache.
        selector._cached_get_attn_backend.cache_clear()
        # vLLM names its runner class inside init_device and offers no hook; the
        # alternative to this scoped substitution is a copy of the method.
        with patch.object(cpu_worker, "CPUModelRunner", EchoCPUModelRunner):
            super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        settle_profile(self.model_runner)
        return times

    def set_echo_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """For ``collective_rpc``: replace options of a running engine, to compare policies in
        one process. ``num_speculative_tokens`` cannot grow, since the engine's reservations and
        tables are sized by it. Returns all options that hold from the next step on."""
        return self.model_runner.set_options(options)

    def start_echo_recording(self) -> None:
        """For ``collective_rpc``: keep a draft trace from now on (``vllm_echo.core.trace``)."""
        self.model_runner.start_recording()

    def take_echo_recording(self) -> bytes:
        """For ``collective_rpc``: the trace since the last call (``DraftTrace.from_bytes``)."""
        return self.model_runner.take_recording()

    def stop_echo_recording(self) -> None:
        """For ``collective_rpc``: go on as configured."""
        self.model_runner.stop_recording()

    def start_echo_step_log(self) -> None:
        """For ``collective_rpc``: keep the times of every step from now on."""
        self.model_runner.timer.start_log()

    def take_echo_step_log(self) -> list[dict[str, Any]]:
        """For ``collective_rpc``: ``StageTimer.take_log``."""
        return self.model_runner.timer.take_log()
