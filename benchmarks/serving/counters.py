# SPDX-License-Identifier: Apache-2.0
"""What a server counts: drafts and steps (/metrics), stage times, and processor time (/proc)."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

PREFIX = "vllm:"
NAMES = {
    "spec_decode_num_drafts_total": "drafts",
    "spec_decode_num_draft_tokens_total": "drafted",
    "spec_decode_num_accepted_tokens_total": "accepted",
    "iteration_tokens_total_count": "steps",
    "num_preemptions_total": "preemptions",
}
UNFINISHED = ("num_requests_running", "num_requests_waiting")
ECHO_PREFIX = "spec_decode_echo_"
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def parse_metrics(text: str) -> dict[str, float]:
    """The counters of a /metrics page that are of interest, summed over their labels."""
    totals: dict[str, float] = dict.fromkeys(NAMES.values(), 0.0)
    for name, value in _samples(text):
        if name in NAMES:
            totals[NAMES[name]] += value
        elif name.startswith(ECHO_PREFIX) and name.endswith("_total"):
            key = f"echo_{name.removeprefix(ECHO_PREFIX).removesuffix('_total')}"
            totals[key] = totals.get(key, 0.0) + value
    return totals


def unfinished_requests(text: str) -> float:
    """Running and waiting ones, by a /metrics page: as the last step left them."""
    return sum(value for name, value in _samples(text) if name in UNFINISHED)


def _samples(text: str) -> Iterator[tuple[str, float]]:
    """vLLM's own, without their labels."""
    for line in text.splitlines():
        if line.startswith(PREFIX):
            series, _, value = line.removeprefix(PREFIX).rpartition(" ")
            yield series.partition("{")[0], float(value)


def drafting(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float | None]:
    """Counts between two moments, and the accepted length with the bonus token: over the
    requests and steps in which something was drafted."""
    counts: dict[str, float | None] = {
        name: value - before.get(name, 0.0) for name, value in after.items()
    }
    drafts, accepted = counts["drafts"], counts["accepted"]
    counts["accepted_length"] = 1 + (accepted or 0.0) / drafts if drafts else None
    return counts


def read_stages(path: Path | None) -> dict[str, Any] | None:
    """The report of ``vllm_echo.core.timing``, if there is one yet."""
    return json.loads(path.read_text()) if path is not None and path.is_file() else None


def stage_difference(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Milliseconds per step and stage between two reports, and counts per step. The report is
    written every few steps, so the first of them may belong to what ran before."""
    if after is None:
        return None
    before = before or {"steps": 0, "seconds": {}, "counts": {}}
    steps = after["steps"] - before["steps"]
    if steps <= 0:
        return None
    return {
        "steps": steps,
        "milliseconds_per_step": {
            stage: 1000 * (total - before["seconds"].get(stage, 0.0)) / steps
            for stage, total in after["seconds"].items()
        },
        "per_step": {
            name: (total - before["counts"].get(name, 0.0)) / steps
            for name, total in after["counts"].items()
        },
    }


def processor_seconds(pids: Iterable[int]) -> float:
    """What these processes have used so far; those that are gone count nothing."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_SECOND


def busy_seconds() -> float:
    """What all processors of the machine together have worked so far."""
    user, nice, system, _, _, irq, softirq, *_ = (
        int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / TICKS_PER_SECOND


def members(group: int) -> list[int]:
    """Processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group:
                found.append(int(entry.name))
    return found


def proportional_memory(pids: Iterable[int]) -> int:
    """Bytes that these processes hold, shared pages in proportion."""
    total = 0
    for pid in pids:
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        except OSError:
            continue
    return total
