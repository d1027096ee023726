# SPDX-License-Identifier: Apache-2.0
"""The worker that serves echo on a CPU: vLLM's own, with our runner and attention."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from vllm.compilation.counter import compilation_counter
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker import cpu_worker

from vllm_echo.integration.cpu.attention import EchoCPUAttentionBackend
from vllm_echo.integration.cpu.quick_profile import settle_profile
from vllm_echo.integration.cpu.runner import EchoCPUModelRunner
from vllm_echo.integration.log import echo_logger

logger = echo_logger(__name__)


class EchoCPUWorker(cpu_worker.CPUWorker):
    """Chosen by ``doors.choose_worker`` when the speculative config carries echo options."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._startup_seconds: dict[str, float] = {}

    @contextmanager
    def _starting(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._startup_seconds[part] = time.perf_counter() - start

    def load_model(self, **options: Any) -> None:
        with self._starting("weights"):
            super().load_model(**options)

    def determine_available_memory(self) -> int:
        before = compilation_counter.clone()
        with self._starting("warm-up"):
            memory = super().determine_available_memory()
        compiled = compilation_counter.num_aot_compiles - before.num_aot_compiles
        loaded = compilation_counter.num_aot_artifacts_loaded - before.num_aot_artifacts_loaded
        logger.info(
            "ECHO: models compiled: %d; loaded from the cache of compiled models: %d",
            compiled,
            loaded,
        )
        return memory

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        with self._starting("KV cache"):
            super().initialize_from_config(kv_cache_config)

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
        with self._starting("cost curve"):
            settle_profile(self.model_runner)
        parts = [f"{part} {seconds:.1f} s" for part, seconds in self._startup_seconds.items()]
        logger.info("ECHO: ready to serve; the worker's start-up took: %s", ", ".join(parts))
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
