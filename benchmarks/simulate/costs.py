# SPDX-License-Identifier: Apache-2.0
"""What simulated steps cost by a cost curve, and what they add up to."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulate.loop import Step
from vllm_echo.core.cost import CostCurve


def verification_ms(curve: CostCurve, step: Step) -> float:
    """The target's forward over roots, prompt rows and nodes, and all that belongs to it. A prompt
    row costs what a node does: the engine samples nothing for it."""
    attention = curve.context_us / 1000 * step.load.num_context_tokens
    prompts = curve.control.each * step.load.num_prefill_tokens
    plain = max(0.0, curve.step_ms(step.load.num_rows) + attention + prompts)
    return plain + curve.nodes_ms(step.load, step.num_nodes)


def drafting_ms(curve: CostCurve, step: Step) -> float:
    """The head's catch-up, first candidates, layers that were really drafted, and control.
    Catch-up is counted by requests, as ``vllm-echo profile`` fits it and the budget reads it."""
    if not step.num_drafting:
        return 0.0
    layers = sum(curve.layer(nodes) for nodes in step.forwards)
    start = curve.catch_up(step.num_drafting) + curve.roots(step.num_drafting)
    return start + layers + curve.control.fixed


@dataclass(frozen=True)
class Result:
    """Sums over the steps of a run."""

    tokens_per_s: float
    step_ms: float
    """Mean, as all that follow."""
    drafting_ms: float
    emitted: float
    """Tokens per request and step: the accepted length with the target's own token."""
    nodes: float
    """Nodes verified per request and step."""
    step_nodes: float
    """Nodes verified per step, all requests together."""
    layers: float
    """Draft forwards per step."""
    drafting_steps: float
    """Share of the steps that drafted."""
    unrecorded: float
    """Share of the expanded nodes whose children the trace does not hold."""


def add_up(curve: CostCurve, steps: Sequence[Step]) -> Result:
    count = len(steps)
    verifying = sum(verification_ms(curve, step) for step in steps)
    drafting = sum(drafting_ms(curve, step) for step in steps)
    emitted = sum(step.num_emitted for step in steps)
    first = sum(step.num_first for step in steps)
    turns = sum(step.load.num_requests for step in steps)
    nodes = sum(step.num_nodes for step in steps)
    expanded = sum(sum(step.forwards) for step in steps)
    return Result(
        tokens_per_s=1000 * (emitted + first) / (verifying + drafting),
        step_ms=(verifying + drafting) / count,
        drafting_ms=drafting / count,
        emitted=emitted / max(1, turns),
        nodes=nodes / max(1, turns),
        step_nodes=nodes / count,
        layers=sum(len(step.forwards) for step in steps) / count,
        drafting_steps=sum(step.num_drafting > 0 for step in steps) / count,
        unrecorded=sum(step.num_unrecorded for step in steps) / max(1, expanded),
    )
