# SPDX-License-Identifier: Apache-2.0
"""An engine process that sleeps while its workers compute.

    vllm serve ... --distributed-executor-backend vllm_echo.integration.cpu.executor.PassiveExecutor

vLLM's engine process looks for its workers' answer without a pause for a second before it sleeps.
On a machine of a few cores that takes one of them from the workers' threads. To be woken instead
costs some tens of microseconds for each answer.
"""

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class PassiveExecutor(MultiprocExecutor):
    """For any engine on a CPU, with or without speculation."""

    def _post_init_executor(self) -> None:
        super()._post_init_executor()
        for queue in self.response_mqs:
            # A queue takes no such option, and its socket is polled from the first look on.
            queue._spin_condition.busy_loop_s = 0.0
