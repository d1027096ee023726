# SPDX-License-Identifier: Apache-2.0
"""Who is drafted for, how deep and with what budget: of plain data, no engine needed."""

from typing import Any

import numpy as np
import pytest
import torch

from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import CostCurve, Line, StepLoad
from vllm_echo.core.pipeline import EchoPipeline
from vllm_echo.core.stats import Undrafted
from vllm_echo.integration.cpu.planner import Limits, Standing, plan_drafts

LIMITS = Limits(max_nodes=8, max_model_len=128, head_context=128, max_requests=16, max_rows=1 << 20)
DEFAULTS: dict[str, Any] = {
    "roots": 50,
    "prefilling": False,
    "num_tokens": 52,
    "num_output": 10,
    "output_left": 90,
    "sampled": False,
    "chain_only": False,
    "thinking_budget": False,
}


def standing(*requests: dict[str, Any], num_absent: int = 0) -> Standing:
    """Of requests that decode in the middle of their context, unless they say otherwise."""
    rows = [DEFAULTS | request for request in requests]
    columns = {key: np.array([row[key] for row in rows]) for key in DEFAULTS}
    return Standing(**columns, num_absent=num_absent)


def pipeline_of(num_nodes: int = 8, **options: Any) -> EchoPipeline:
    options = {"policy": "echo", "k_max": 1000} | options
    config = EchoConfig(num_speculative_tokens=num_nodes, **options)
    return EchoPipeline(config, 1, torch.device("cpu"))


def reasons_of(counts: list[int]) -> dict[Undrafted, int]:
    return {Undrafted(place): count for place, count in enumerate(counts) if count}


LEFT_OUT: list[tuple[dict[str, Any], Undrafted]] = [
    ({"prefilling": True, "num_output": 0}, Undrafted.PREFILL),
    ({"prefilling": True, "thinking_budget": True}, Undrafted.PREFILL),
    ({"num_output": 0}, Undrafted.NO_SAMPLE),
    ({"thinking_budget": True}, Undrafted.THINKING_BUDGET),
    ({"roots": 125}, Undrafted.MAX_MODEL_LEN),
    ({"output_left": 1}, Undrafted.LAST_TOKEN),
    ({"roots": 100}, Undrafted.HEAD_CONTEXT),
]


@pytest.mark.parametrize(("request_", "reason"), LEFT_OUT, ids=lambda value: str(value))
def test_whoever_is_left_out_is_counted_by_the_reason(
    request_: dict[str, Any], reason: Undrafted
) -> None:
    limits = Limits(8, 128, head_context=100, max_requests=16)
    plan = plan_drafts(standing(request_, {}), limits, pipeline_of())
    assert plan.requests.tolist() == [1]
    assert reasons_of(plan.undrafted) == {reason: 1}


def test_whoever_has_ended_is_no_load_and_not_counted() -> None:
    plan = plan_drafts(standing({"output_left": 0}, {}), LIMITS, pipeline_of())
    assert plan.load == StepLoad(1, 0, 50)
    assert reasons_of(plan.undrafted) == {}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"k_max": 0}, Undrafted.NO_BUDGET),
        ({"k_max": "auto"}, Undrafted.NO_CURVE),
        ({"policy": "goodput"}, Undrafted.NO_CURVE),
        ({"k_max": "auto", "profile": "dear"}, Undrafted.NO_GAIN),
        ({"policy": "goodput", "k_max": 0, "profile": "dear"}, Undrafted.NO_BUDGET),
    ],
)
def test_no_budget_for_anybody_has_a_reason(options: dict[str, Any], reason: Undrafted) -> None:
    if "profile" in options:
        step = tuple((rows, 10.0 * rows) for rows in (1, 8, 64))
        nothing = Line(0.0, 0.0)
        curve = CostCurve(step, roots=nothing, layer=nothing, catch_up=nothing, control=nothing)
        options = options | {"profile": curve}
    plan = plan_drafts(standing({}, {"output_left": 1}), LIMITS, pipeline_of(**options))
    assert plan.requests.tolist() == []
    assert reasons_of(plan.undrafted) == {reason: 1, Undrafted.LAST_TOKEN: 1}


def test_prompt_rows_of_a_resumed_request_are_those_that_are_left() -> None:
    """A preempted request prefills its own output again: catches rows counted against the
    prompt's length alone, which are then less than none."""
    resumed = {"prefilling": True, "roots": 399, "num_tokens": 600, "num_output": 500}
    new = {"prefilling": True, "roots": 29, "num_tokens": 50, "num_output": 0}
    plan = plan_drafts(standing(resumed, new, {"roots": 70}), LIMITS, pipeline_of())
    assert plan.load == StepLoad(1, 200 + 20, 70)


@pytest.mark.parametrize("num_nodes", [8, 64, 255])
def test_drafting_goes_on_as_long_as_a_node_fits(num_nodes: int) -> None:
    """A budget of nodes is no length: catches positions kept free for a chain that is never
    drafted, which left a request of a short context without drafts for good."""
    limits = Limits(num_nodes, 128, head_context=128, max_requests=16)
    plan = plan_drafts(
        standing(*({"roots": root} for root in range(128))), limits, pipeline_of(num_nodes)
    )
    # The next root is at root + 1, its node behind it, and the token after that ends the request.
    assert plan.requests.tolist() == list(range(125))
    assert plan.batch.max_nodes.tolist() == [min(num_nodes, 125 - root) for root in range(125)]


@pytest.mark.parametrize("num_nodes", [8, 64, 255])
def test_a_layer_is_drafted_where_its_parents_have_slots_and_positions(num_nodes: int) -> None:
    pipeline = pipeline_of(num_nodes, max_depth=6, top_k=3)
    widths = pipeline.policy.shape.frontier_widths
    limits = Limits(num_nodes, 128, head_context=100, max_requests=16)
    plan = plan_drafts(
        standing(*({"roots": root} for root in range(100))), limits, pipeline_of(num_nodes)
    )
    for root, depth in enumerate(plan.batch.max_depths.tolist()):
        assert root + depth - 1 < 100, "a position beyond the head's"
        deepest = min(depth, 6)
        assert root + sum(widths[: deepest - 1]) < 128, "a draft slot beyond the context"
        fits = root + deepest < 100 and root + sum(widths[:deepest]) < 128
        assert depth >= 6 or not fits, "one layer more would fit"
    assert plan.batch.max_depths.tolist()[-3:] == [3, 2, 1]


def test_draft_slots_end_with_the_context() -> None:
    """Twelve nodes of three layers would be expanded, and one, two, three of them have a slot."""
    pipeline = pipeline_of(64, max_depth=4, top_k=4)
    roots = [128 - 1 - 12, 128 - 12, 128 - 1 - 4, 128 - 4]
    limits = Limits(64, 128, head_context=128, max_requests=16)
    plan = plan_drafts(standing(*({"roots": root} for root in roots)), limits, pipeline)
    assert pipeline.policy.shape.frontier_widths == (4, 4, 4)
    assert plan.batch.max_depths.tolist() == [4, 3, 2, 1]
    assert plan.batch.can_expand.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("running", "absent", "prompt_rows", "rows", "offered"),
    [
        (16, 0, 0, 40, 24),  # no free seat: all that is left
        (12, 4, 0, 40, 24),  # a request that got no row this time gets one next
        (8, 0, 0, 40, 16),  # a prompt may wait for a free seat: half is its own
        (15, 0, 6, 40, 18),  # 15 that decode, one that prefills its last 6 rows
        (15, 0, 900, 40, 12),  # or more than there are
        (16, 0, 0, 4000, 1000),  # as configured
        (2, 40, 0, 40, 24),  # sessions that wait for their users take no rows beyond the seats
    ],
)
def test_a_budget_leaves_every_request_its_row(
    running: int, absent: int, prompt_rows: int, rows: int, offered: int
) -> None:
    """The scheduler serves requests in turn: catches a constant k_max with which the nodes of the
    first took the rows of the last, for as long as they ran."""
    limits = Limits(8, 4096, head_context=4096, max_requests=16, max_rows=rows)
    requests = [{} for _ in range(running)]
    if prompt_rows:
        requests.append({"prefilling": True, "num_tokens": 51 + prompt_rows, "num_output": 0})
    plan = plan_drafts(standing(*requests, num_absent=absent), limits, pipeline_of())
    assert plan.offer.num_nodes == offered


def test_no_row_left_is_a_reason() -> None:
    limits = Limits(8, 4096, head_context=4096, max_requests=16, max_rows=16)
    plan = plan_drafts(standing(*({} for _ in range(16))), limits, pipeline_of())
    assert plan.offer.num_nodes == 0
    assert reasons_of(plan.undrafted) == {Undrafted.NO_ROWS: 16}
