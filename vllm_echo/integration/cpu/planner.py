# SPDX-License-Identifier: Apache-2.0
"""Who is drafted for after a step, how far, and with what budget; and why the others are not.

Plain data in, plain data out: what the batch holds (``Standing``) and what the engine allows
(``Limits``) are laid down by the runner.
"""

import sys
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from vllm_echo.core.budget import NOTHING, Offer
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import StepLoad
from vllm_echo.core.draft import DraftBatch
from vllm_echo.core.pipeline import EchoPipeline
from vllm_echo.core.shape import TreeShape
from vllm_echo.core.stats import Undrafted

_DRAFTED = -1
"""Instead of a reason."""


@dataclass
class Standing:
    """Where each of the batch's R requests stands once a step's tokens are known."""

    roots: np.ndarray
    """[R] int64, last final position: the next step's root is one further, and its nodes' slots
    follow."""
    prefilling: np.ndarray
    """[R] bool, its prompt (or what it had before a preemption) is not all computed."""
    num_tokens: np.ndarray
    """[R] int64, prompt and output."""
    num_output: np.ndarray
    """[R] int64, output tokens; none although the prefill is done: nothing could be sampled."""
    output_left: np.ndarray
    """[R] int64, tokens that it may still emit; 0: it has just had its last one."""
    sampled: np.ndarray
    """[R] bool, temperature above 0."""
    chain_only: np.ndarray
    """[R] bool, structured output."""
    thinking_budget: np.ndarray
    """[R] bool, vLLM's state for it knows one row a step."""
    num_absent: int = 0
    """Requests that the runner knows and this step did not carry."""

    @cached_property
    def goes_on(self) -> np.ndarray:
        """[R] bool, it will be in a later step."""
        return (self.output_left > 0) | self.prefilling | (self.num_output == 0)


@dataclass(frozen=True)
class Limits:
    """What the engine allows, equal on all ranks."""

    max_nodes: int
    """Of a request in a step (``num_speculative_tokens``)."""
    max_model_len: int
    head_context: int
    """Positions that the head may look at."""
    max_requests: int
    """Seats in a step."""
    max_rows: int = sys.maxsize
    """Rows that the scheduler gives in a step, all requests together."""


@dataclass
class DraftPlan:
    """Who is drafted for in a step: A of the batch's requests."""

    requests: torch.Tensor
    """[A] int64, batch rows."""
    batch: DraftBatch
    """Theirs."""
    load: StepLoad
    offer: Offer
    undrafted: list[int]
    """[reason] requests that go on and are not drafted for (``Undrafted``)."""


_NOBODY = DraftBatch(
    max_nodes=torch.empty(0, dtype=torch.int32),
    can_expand=torch.empty(0, dtype=torch.bool),
    chain_only=torch.empty(0, dtype=torch.bool),
    max_depths=torch.empty(0, dtype=torch.int32),
    sampled=torch.empty(0, dtype=torch.bool),
)


def plan_drafts(now: Standing, limits: Limits, pipeline: EchoPipeline) -> DraftPlan:
    """Whom to draft for, and the next step's budget."""
    load = next_load(now, limits)
    reasons = _reasons(now, limits)
    requests = (reasons == _DRAFTED).nonzero()[0]
    offer = NOTHING
    if requests.shape[0]:
        offer = pipeline.offer(load, int(now.sampled[requests].sum()))
        room = rows_for_nodes(now, load, limits)
        if offer.num_nodes == 0:
            reasons[requests] = _why_no_offer(pipeline.config)
        elif room == 0:
            offer, reasons[requests] = NOTHING, Undrafted.NO_ROWS
        elif offer.num_nodes > room:
            offer = replace(offer, num_nodes=room)
    undrafted = np.bincount(reasons[now.goes_on & (reasons != _DRAFTED)]).tolist()
    if offer.num_nodes == 0:
        return DraftPlan(_NOBODY.max_nodes.long(), _NOBODY, load, offer, undrafted)
    depths = useful_depths(now, limits, pipeline.policy.shape)[requests]
    most = np.minimum(limits.max_model_len - 3 - now.roots[requests], limits.max_nodes)
    batch = DraftBatch(
        max_nodes=torch.from_numpy(most.astype(np.int32)),
        can_expand=torch.from_numpy(depths > 1),
        chain_only=torch.from_numpy(now.chain_only[requests]),
        max_depths=torch.from_numpy(depths.astype(np.int32)),
        sampled=torch.from_numpy(now.sampled[requests]),
    )
    return DraftPlan(torch.from_numpy(requests), batch, load, offer, undrafted)


def next_load(now: Standing, limits: Limits) -> StepLoad:
    """What the next step will carry, as far as it is known: the scheduler may add prompts that
    wait, and nobody here knows of them."""
    decoding = now.goes_on & ~now.prefilling
    prompts = (now.num_tokens - now.roots - 1)[now.prefilling]
    return StepLoad(
        num_requests=int(decoding.sum()),
        num_prefill_tokens=min(max(0, int(prompts.sum())), limits.max_rows),
        num_context_tokens=int(now.roots[decoding].sum()),
    )


def rows_for_nodes(now: Standing, load: StepLoad, limits: Limits) -> int:
    """Most nodes that the next step has rows for. The scheduler serves its running requests in
    turn, one row and the nodes of each, and prompts from what is left: without this bound the
    nodes of the first would leave no row for the last.

    Of the rows beside the requests' own, half are the prompts': those that are in the batch, and,
    while there is a free seat, those that may wait for one.
    """
    # Not all that are absent will be there: some wait for their user's next words.
    running = min(int(now.goes_on.sum()) + now.num_absent, limits.max_requests)
    free = max(0, limits.max_rows - running)
    prompts = free if running < limits.max_requests else load.num_prefill_tokens
    return free - min(prompts, free // 2)


def useful_depths(now: Standing, limits: Limits, shape: TreeShape) -> np.ndarray:
    """[R] int64, deepest layer that can be drafted and whose tokens could still be emitted."""
    # A step emits an accepted path and one token more.
    emitted = now.output_left - 1
    # The nodes that are expanded for layer d look at positions up to root + d - 1 ...
    seen = limits.head_context - now.roots
    # ... and have a draft slot each behind the root's, within the context.
    slots = limits.max_model_len - 1 - now.roots
    held = 1 + np.cumsum(shape.frontier_widths).searchsorted(slots, side="right")
    return np.minimum(np.minimum(emitted, seen), held)


def _reasons(now: Standing, limits: Limits) -> np.ndarray:
    """[R] int64: why a request is not drafted for, whatever the budget; or ``_DRAFTED``."""
    reasons = np.full(now.roots.shape, _DRAFTED)
    # Where several hold, the last one stays: the first in the order of `Undrafted`.
    reasons[now.roots >= limits.head_context] = Undrafted.HEAD_CONTEXT
    reasons[now.output_left <= 1] = Undrafted.LAST_TOKEN
    reasons[now.roots > limits.max_model_len - 4] = Undrafted.MAX_MODEL_LEN
    reasons[now.thinking_budget] = Undrafted.THINKING_BUDGET
    reasons[now.num_output == 0] = Undrafted.NO_SAMPLE
    reasons[now.prefilling] = Undrafted.PREFILL
    return reasons


def _why_no_offer(config: EchoConfig) -> Undrafted:
    if config.needs_profile and config.profile is None:
        return Undrafted.NO_CURVE
    return Undrafted.NO_BUDGET if config.k_max == 0 else Undrafted.NO_GAIN
