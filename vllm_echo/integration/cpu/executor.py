# SPDX-License-Identifier: Apache-2.0
"""An engine process that naps while its workers compute.

    vllm serve ... --distributed-executor-backend vllm_echo.integration.cpu.executor.PassiveExecutor

For the first second of a wait vLLM's engine process looks for its workers' answer without a pause.
On a machine of a few cores that takes one of them from the workers' threads.
"""

import time
from collections.abc import Callable

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

NAP_SECONDS = 0.0002
"""An answer is seen half of this late on average, and a look takes a tenth of it."""


class PassiveExecutor(MultiprocExecutor):
    """For any engine on a CPU, with or without speculation."""

    def _post_init_executor(self) -> None:
        super()._post_init_executor()
        for queue in self.response_mqs:
            queue._spin_condition.wait = napping_wait(queue._spin_condition)


def napping_wait(condition: SpinCondition) -> Callable[..., None]:
    """``condition.wait``, but for naps where it spins.

    Its own sleep, until a message says that there is something to read, cannot be had earlier:
    of two messages within a millisecond the second is dropped, and only the first read after a
    pause may rely on them.
    """
    wait = condition.wait

    def nap(timeout_ms: int | None = None) -> None:
        if time.monotonic() <= condition.last_read + condition.busy_loop_s:
            time.sleep(NAP_SECONDS)
        else:
            wait(timeout_ms)

    return nap
