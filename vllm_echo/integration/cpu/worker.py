# SPDX-License-Identifier: Apache-2.0
"""The worker that serves echo on a CPU: vLLM's own, with our runner and attention."""

from unittest.mock import patch

from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker import cpu_worker

from vllm_echo.integration.cpu.attention import EchoCPUAttentionBackend
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
