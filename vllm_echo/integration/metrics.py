# SPDX-License-Identifier: Apache-2.0
"""The counts of ``core.stats`` as Prometheus metrics, and as a line of vLLM's periodic log.

Both are fed by vLLM's own stat loggers (patches/), in the front-end's process. docs/metrics.md
says what each metric counts.
"""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from vllm.v1.metrics.utils import create_metric_per_engine

from vllm_echo.core.config import EchoConfig
from vllm_echo.core.decision import Rule
from vllm_echo.core.policies import make_policy
from vllm_echo.core.stats import StepStats, Undrafted

PREFIX = "vllm:spec_decode_echo_"

# Field or property of StepStats -> name after PREFIX, documentation.
BY_DEPTH = {
    "drafted": ("num_nodes_drafted", "Candidates drafted, by depth."),
    "verified": ("num_nodes_verified", "Nodes in the target's forward, by depth."),
    "accepted": ("num_nodes_accepted", "Accepted nodes, by depth."),
}
BY_GATE = {
    "gate_passes": ("num_gate_passes", "Requests that passed a gate, by the gate's depth."),
    "gate_truncations": (
        "num_gate_truncations",
        "Requests truncated by a gate, by the gate's depth.",
    ),
}
UNDRAFTED = ("num_requests_undrafted", "Requests without a candidate, one a step, by reason.")
PLAIN = {
    "steps_with_drafts": ("num_steps_with_drafts", "Steps that drafted for a request."),
    "steps_without_drafts": ("num_steps_without_drafts", "Steps that drafted for nobody."),
    "offered": ("budget_offered", "K_max, summed over the steps with drafts."),
    "used": ("budget_used", "Nodes handed to the engine."),
    "moved": ("budget_moved", "Nodes beyond an even split of K_max over a step's requests."),
    "on_depth": ("budget_on_depth", "Of the nodes used: the heights of the trees."),
    "on_width": ("budget_on_width", "Of the nodes used: all others."),
}
ACCEPTED_LENGTH = (
    "accepted_length",
    "Tokens emitted by a request in a step that verified nodes of it.",
)


class EchoProm:
    """The metrics of all engines of a front-end. ``labelnames`` and ``labelvalues`` (by engine) are
    vLLM's; the classes are prometheus_client's, or vLLM's wrappers for Ray."""

    def __init__(
        self,
        config: EchoConfig,
        labelnames: list[str],
        labelvalues: dict[int, list[object]],
        counter_cls: Callable[..., Any],
        histogram_cls: Callable[..., Any],
    ):
        def counter(spec: tuple[str, str], label: list[str]) -> Any:
            return counter_cls(
                name=PREFIX + spec[0], documentation=spec[1], labelnames=labelnames + label
            )

        self._labelvalues = labelvalues
        self._plain = {
            key: create_metric_per_engine(counter(spec, []), labelvalues)
            for key, spec in PLAIN.items()
        }
        self._by_depth = {key: counter(spec, ["depth"]) for key, spec in BY_DEPTH.items()}
        self._by_gate = {key: counter(spec, ["gate"]) for key, spec in BY_GATE.items()}
        self._undrafted = {"undrafted": counter(UNDRAFTED, ["reason"])}
        name, documentation = ACCEPTED_LENGTH
        lengths = histogram_cls(
            name=PREFIX + name,
            documentation=documentation,
            buckets=[float(length) for length in range(1, config.max_depth + 2)],
            labelnames=labelnames,
        )
        self._lengths = create_metric_per_engine(lengths, labelvalues)
        self._children: dict[tuple[str, int, int | str], Any] = {}
        self._start_at_zero(config)

    def _start_at_zero(self, config: EchoConfig) -> None:
        """Show the depths and gates of the configuration, and all reasons, before anything
        happens at them."""
        for engine in self._labelvalues:
            for key in BY_DEPTH:
                for depth in range(1, config.max_depth + 1):
                    self._child(self._by_depth, key, engine, depth)
            for key in BY_GATE:
                for gate in gates_asked(config):
                    self._child(self._by_gate, key, engine, gate)
            for reason in Undrafted:
                self._child(self._undrafted, "undrafted", engine, reason.label)

    def _child(self, counters: dict[str, Any], key: str, engine: int, label: int | str) -> Any:
        """The counter of a depth, gate or reason. Kept: making one takes a lock and a look-up."""
        place = (key, engine, label)
        if place not in self._children:
            values = [*self._labelvalues[engine], str(label)]
            self._children[place] = counters[key].labels(*values)
        return self._children[place]

    def observe(self, counts: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one step's ``StepStats.to_dict`` of an engine."""
        stats = StepStats.from_dict(counts)
        for key, counters in self._plain.items():
            counters[engine_idx].inc(getattr(stats, key))
        for kinds, first in ((self._by_depth, 1), (self._by_gate, 0)):
            for key in kinds:
                for label, count in enumerate(getattr(stats, key), start=first):
                    if count:
                        self._child(kinds, key, engine_idx, label).inc(count)
        for reason, count in by_reason(stats):
            self._child(self._undrafted, "undrafted", engine_idx, reason.label).inc(count)
        for length, count in enumerate(stats.emitted, start=1):
            for _ in range(count):
                self._lengths[engine_idx].observe(length)


class EchoLogging:
    """One line for each interval of vLLM's periodic log that had steps."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.stats = StepStats()

    def observe(self, counts: dict[str, Any]) -> None:
        """Add one step's ``StepStats.to_dict``, whichever engine's."""
        self.stats.merge(StepStats.from_dict(counts))

    def log(self, log_fn: Callable[..., Any]) -> None:
        """Write the interval's line, and begin the next interval."""
        if self.stats.num_steps:
            log_fn("ECHO metrics: %s", describe(self.stats))
        self.reset()


def gates_asked(config: EchoConfig) -> list[int]:
    """Depths of the gates that the configuration's policy asks."""
    policy = make_policy(config)
    if policy.rule is not Rule.GATES:
        return []
    return [depth for depth, threshold in enumerate(policy.thresholds) if threshold is not None]


def by_reason(stats: StepStats) -> list[tuple[Undrafted, int]]:
    """The reasons that left somebody out, and how often they did."""
    return [(Undrafted(place), count) for place, count in enumerate(stats.undrafted) if count]


def describe(stats: StepStats) -> str:
    """The counts in a line. What did not happen is left out."""
    parts = [f"Steps: {stats.steps_with_drafts} with drafts, {stats.steps_without_drafts} without"]
    if stats.emitted:
        length = 1 + sum(stats.accepted) / sum(stats.emitted)
        parts.append(f"Mean accepted length: {length:.2f}")
    if stats.drafted or stats.verified:
        nodes = _by_place(1, stats.drafted, stats.verified, stats.accepted)
        parts.append(f"Nodes drafted/verified/accepted by depth: {nodes}")
    if stats.gate_passes:
        gates = _by_place(0, stats.gate_passes, stats.gate_truncations)
        parts.append(f"Passed/truncated by gate: {gates}")
    if stats.steps_with_drafts:
        parts.append(
            f"Budget: {stats.offered} offered, {stats.used} used, {stats.moved} moved, "
            f"{stats.on_depth} on depth, {stats.on_width} on width"
        )
    left_out = [f"{reason.label}: {count}" for reason, count in by_reason(stats)]
    if left_out:
        parts.append(f"Requests without drafts by reason: {', '.join(left_out)}")
    return ", ".join(parts)


def _by_place(first: int, *counts: list[int]) -> str:
    """ "1: 30/12/9, 2: 18/6/4", the places at which anything was counted."""
    rows = enumerate(zip_longest(*counts, fillvalue=0), start=first)
    return ", ".join(f"{place}: {'/'.join(map(str, row))}" for place, row in rows if any(row))
