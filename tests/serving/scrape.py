# SPDX-License-Identifier: Apache-2.0
"""What a scrape of /metrics shows of speculation, and what must hold of it."""

import math

import prometheus_client
from prometheus_client.parser import text_string_to_metric_families

VLLM = "vllm:spec_decode_"
ECHO = "vllm:spec_decode_echo_"


class Metrics:
    """What a scrape shows of speculation."""

    def __init__(self, text: str):
        self._samples = [
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith(VLLM) and not sample.name.endswith("_created")
        ]

    @property
    def names(self) -> set[str]:
        return {sample.name for sample in self._samples}

    @property
    def labels(self) -> set[frozenset[str]]:
        return {frozenset(sample.labels) for sample in self._samples if ECHO in sample.name}

    @property
    def values(self) -> list[float]:
        return [sample.value for sample in self._samples]

    def total(self, name: str) -> float:
        """The sum over all labels."""
        assert name in self.names
        return sum(sample.value for sample in self._samples if sample.name == name)

    def by(self, name: str, label: str) -> dict[int, float]:
        """{label's value: count}, without zeros."""
        return {
            int(sample.labels[label]): sample.value
            for sample in self._samples
            if sample.name == name and sample.value
        }

    def nodes(self, kind: str) -> dict[int, float]:
        return self.by(f"{ECHO}num_nodes_{kind}_total", "depth")

    def budget(self, kind: str) -> float:
        return self.total(f"{ECHO}budget_{kind}_total")

    def left_out(self) -> dict[str, float]:
        """{reason: requests}, without zeros."""
        name = f"{ECHO}num_requests_undrafted_total"
        assert name in self.names
        return {s.labels["reason"]: s.value for s in self._samples if s.name == name and s.value}

    def steps(self, kind: str) -> float:
        return self.total(f"{ECHO}num_steps_{kind}_drafts_total")

    def require_consistency(self) -> None:
        """What holds of any scrape between two generations."""
        assert all(math.isfinite(value) and value >= 0 for value in self.values)
        drafted, verified, accepted = map(self.nodes, ("drafted", "verified", "accepted"))
        for depth in drafted | verified | accepted:
            assert drafted.get(depth, 0) >= verified.get(depth, 0) >= accepted.get(depth, 0)
        assert self.budget("offered") >= self.budget("used") >= sum(verified.values())
        assert self.budget("used") == self.budget("on_depth") + self.budget("on_width")
        assert self.budget("used") >= self.budget("moved")
        assert sum(verified.values()) == self.total(f"{VLLM}num_draft_tokens_total")
        assert accepted == {
            position + 1: count
            for position, count in self.by(
                f"{VLLM}num_accepted_tokens_per_pos_total", "position"
            ).items()
        }
        assert sum(accepted.values()) == self.total(f"{VLLM}num_accepted_tokens_total")
        drafts = self.total(f"{VLLM}num_drafts_total")
        assert self.total(f"{ECHO}accepted_length_count") == drafts
        assert self.total(f"{ECHO}accepted_length_sum") == drafts + sum(accepted.values())


def scrape() -> Metrics:
    """This process's metrics: those of the engine that was started last with statistics."""
    return Metrics(prometheus_client.generate_latest().decode())
