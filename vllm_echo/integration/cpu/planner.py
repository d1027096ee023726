# SPDX-License-Identifier: Apache-2.0
"""Who is drafted for after a step, how far, and with what budget."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm import SamplingParams

from vllm_echo.core.budget import NOTHING, Offer
from vllm_echo.core.cost import StepLoad
from vllm_echo.core.draft import DraftBatch

if TYPE_CHECKING:
    from vllm_echo.integration.cpu.runner import EchoCPUModelRunner

_ENDS = -1
"""Instead of a depth: the request has just had its last token."""


@dataclass
class DraftPlan:
    """Who is drafted for in a step: A of the batch's requests."""

    requests: torch.Tensor
    """[A] int64, batch rows."""
    batch: DraftBatch
    """Theirs."""
    load: StepLoad
    offer: Offer


_NOBODY = DraftBatch(
    max_nodes=torch.empty(0, dtype=torch.int32),
    can_expand=torch.empty(0, dtype=torch.bool),
    chain_only=torch.empty(0, dtype=torch.bool),
    max_depths=torch.empty(0, dtype=torch.int32),
    sampled=torch.empty(0, dtype=torch.bool),
)


def plan_drafts(runner: "EchoCPUModelRunner", roots: np.ndarray) -> DraftPlan:
    """``roots`` [R] int64: last final positions; the next step's root is one further, and its
    nodes' slots follow."""
    params = [runner.requests[req_id].sampling_params for req_id in runner.input_batch.req_ids]
    depths = np.array([_useful_depth(runner, i, p) for i, p in enumerate(params)], dtype=np.int32)
    load = _next_load(runner, roots, depths != _ENDS)
    most = _most_nodes(runner, roots) * (depths > 0)
    requests = most.nonzero()[0]
    sampled = np.array([params[index].temperature > 0 for index in requests], dtype=bool)
    offer = NOTHING
    if requests.shape[0]:
        offer = runner.pipeline.policy.offer(load, int(sampled.sum()))
    if offer.num_nodes == 0:
        return DraftPlan(_NOBODY.max_nodes.long(), _NOBODY, load, offer)
    chains = [params[index].structured_outputs is not None for index in requests]
    last_slots = roots[requests] + 1 + runner.pipeline.policy.shape.num_draft_slots
    batch = DraftBatch(
        max_nodes=torch.from_numpy(most[requests].astype(np.int32)),
        can_expand=torch.from_numpy(last_slots <= runner.max_model_len),
        chain_only=torch.tensor(chains, dtype=torch.bool),
        max_depths=torch.from_numpy(depths[requests]),
        sampled=torch.from_numpy(sampled),
    )
    return DraftPlan(torch.from_numpy(requests), batch, load, offer)


def _next_load(runner: "EchoCPUModelRunner", roots: np.ndarray, goes_on: np.ndarray) -> StepLoad:
    """What the next step will carry, as far as it is known: the scheduler may add prompts that
    wait, and nobody here knows of them."""
    prefilling = runner.discard_request_mask.np[: len(goes_on)]
    decoding = goes_on & ~prefilling
    num_prefill = 0
    for index in prefilling.nonzero()[0]:
        request = runner.requests[runner.input_batch.req_ids[index]]
        num_prefill += request.num_tokens - int(roots[index]) - 1
    return StepLoad(
        num_requests=int(decoding.sum()),
        num_prefill_tokens=min(max(0, num_prefill), runner.max_num_tokens),
        num_context_tokens=int(roots[decoding].sum()),
    )


def _most_nodes(runner: "EchoCPUModelRunner", roots: np.ndarray) -> np.ndarray:
    """[R]: nodes that each request's length limits leave room for."""
    most = runner.pipeline.config.num_speculative_tokens
    room = np.minimum(np.maximum(runner.max_model_len - 3 - roots, 0), most)
    # vLLM's head has a length limit of its own.
    return room * (roots + 2 + runner.num_spec_tokens <= runner.effective_drafter_max_model_len)


def _useful_depth(runner: "EchoCPUModelRunner", index: int, params: SamplingParams) -> int:
    """Deepest layer whose tokens could still be emitted; 0 for a request that is not drafted
    for: in the middle of its prefill, or with a thinking budget."""
    if runner.discard_request_mask.np[index]:
        return 0
    output = runner.requests[runner.input_batch.req_ids[index]].output_token_ids
    if not output:
        return 0  # nothing could be sampled: logits that are no numbers
    # As vLLM's `check_stop` does after this step: a request may ignore the end of a sequence.
    stops = output[-1] == params.eos_token_id or output[-1] in (params.stop_token_ids or ())
    if stops and len(output) >= params.min_tokens:
        return _ENDS
    left = runner.max_model_len
    if params.max_tokens is not None:
        left = params.max_tokens - len(output)
    if left <= 0:
        return _ENDS
    if params.thinking_token_budget is not None:
        return 0
    # A step emits an accepted path and one token more.
    return left - 1
