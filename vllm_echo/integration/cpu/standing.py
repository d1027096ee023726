# SPDX-License-Identifier: Apache-2.0
"""vLLM's request states as the planner's arrays."""

from collections.abc import Sequence

import numpy as np
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_echo.integration.cpu.planner import Standing
from vllm_echo.integration.cpu.stops import has_ended


def standing_of(
    states: Sequence[CachedRequestState],
    roots: np.ndarray,
    prefilling: np.ndarray,
    max_model_len: int,
    num_absent: int,
) -> Standing:
    """The batch's R requests; ``roots`` [R] int64 and ``prefilling`` [R] bool are theirs."""
    facts = np.array([_facts(state, max_model_len) for state in states], dtype=np.int64)
    tokens, output, left, sampled, chain_only, thinking = facts.reshape(-1, 6).T
    return Standing(
        roots=roots,
        prefilling=prefilling,
        num_tokens=tokens,
        num_output=output,
        output_left=left,
        sampled=sampled > 0,
        chain_only=chain_only > 0,
        thinking_budget=thinking > 0,
        num_absent=num_absent,
    )


def _facts(state: CachedRequestState, max_model_len: int) -> tuple[int, ...]:
    params, output = state.sampling_params, state.output_token_ids
    assert params is not None, "pooling models are refused"
    num_output = len(output)
    left = max_model_len if params.max_tokens is None else params.max_tokens - num_output
    if output and has_ended(state, max_model_len):
        left = 0
    return (
        state.num_prompt_tokens + num_output,
        num_output,
        max(0, left),
        params.temperature > 0,
        params.structured_outputs is not None,
        params.thinking_token_budget is not None,
    )
