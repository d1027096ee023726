# SPDX-License-Identifier: Apache-2.0
"""Where a request's output ends: vLLM's own rule, asked while a path is still being walked.

The scheduler cuts an output at its end only after it has counted all accepted tokens as computed.
So a path must not lead beyond: what a request leaves behind (computed tokens, cached blocks, its
random stream) would not be that of plain decoding, and a session with streaming input goes on
from there. Stop strings are the front-end's, which aborts the request later, with and without
speculation.
"""

from collections.abc import Sequence
from typing import cast

from vllm import SamplingParams
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.request import Request
from vllm.v1.worker.gpu_input_batch import CachedRequestState


class _RequestView:
    """A runner's request with the names by which the scheduler's rule reads it and answers."""

    __slots__ = (
        "max_tokens",
        "num_output_tokens",
        "num_tokens",
        "output_token_ids",
        "pooling_params",
        "sampling_params",
        "status",
        "stop_reason",
    )

    def __init__(self, state: CachedRequestState):
        self.pooling_params = None
        self.sampling_params = cast(SamplingParams, state.sampling_params)
        self.max_tokens = self.sampling_params.max_tokens
        self.output_token_ids = state.output_token_ids
        self.num_output_tokens = len(state.output_token_ids)
        self.num_tokens = state.num_tokens


def has_ended(state: CachedRequestState, max_model_len: int) -> bool:
    """Whether the last token of a request's output (of one at least) is its end."""
    return check_stop(cast(Request, _RequestView(state)), max_model_len)


class PathOutputs:
    """The outputs of a batch, growing along the paths of a step.

    Penalties and processors read the lists that grow here. On leaving, they are as they were: the
    runner appends a step's tokens itself once its books are made up.
    """

    def __init__(self, states: Sequence[CachedRequestState], max_model_len: int):
        self._states = states
        self._max_model_len = max_model_len
        self._lengths: dict[int, int] = {}

    def __enter__(self) -> "PathOutputs":
        return self

    def __exit__(self, *_: object) -> None:
        for request, length in self._lengths.items():
            del self._states[request].output_token_ids[length:]

    def ends_with(self, request: int, token: int) -> bool:
        """``vllm_echo.core.accept.EndsWith``: appends the token, and asks the rule."""
        state = self._states[request]
        self._lengths.setdefault(request, len(state.output_token_ids))
        state.output_token_ids.append(token)
        return has_ended(state, self._max_model_len)
