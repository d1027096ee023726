# SPDX-License-Identifier: Apache-2.0
"""Measured tokens per second, in the policies' names here."""

import json
import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.simulate.plans import PLAIN

OTHER_PLAIN = "none-sync"
"""Plain decoding in the other of its two settings: the better one of each load counts."""

Measured = dict[str, dict[int, float]]
"""Tokens per second by policy and concurrency."""


def read_measured(path: Path) -> Measured:
    """{"policy": {"concurrency": tokens per second}}, or what ``benchmarks.serving`` writes (its
    results.jsonl, or one JSON object with "measurements"): medians of the greedy ones."""
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return _medians(line for line in lines if "tokens_per_second" in line)
    raw = json.loads(path.read_text())
    return _medians(raw["measurements"]) if "measurements" in raw else _table(raw)


def _medians(measurements: Iterable[Mapping[str, Any]]) -> Measured:
    found: dict[str, dict[int, list[float]]] = {}
    for m in measurements:
        if m.get("temperature", 0) == 0:
            loads = found.setdefault(policy_of(m["engine"]), {})
            loads.setdefault(int(m["concurrency"]), []).append(m["tokens_per_second"])
    medians = {
        name: {load: statistics.median(speeds) for load, speeds in loads.items()}
        for name, loads in found.items()
    }
    for load, speed in medians.pop(OTHER_PLAIN, {}).items():
        plain = medians.setdefault(PLAIN, {})
        plain[load] = max(speed, plain.get(load, 0.0))
    return medians


def _table(raw: Mapping[str, Any]) -> Measured:
    """Entries that are no table by concurrency are skipped; a value may be a number or an object
    with ``tokens_per_second``."""
    return {
        policy_of(label): {
            int(load): float(value["tokens_per_second"] if isinstance(value, Mapping) else value)
            for load, value in table.items()
        }
        for label, table in raw.items()
        if isinstance(table, Mapping) and all(str(load).isdigit() for load in table)
    }


def policy_of(engine: str) -> str:
    """ "none" and "no speculation" are ``plain``; "eagle3-2" and "eagle3, K = 2" ``chain-2``."""
    if engine in ("none", "no speculation"):
        return PLAIN
    match = re.fullmatch(r"(?:vllm )?eagle3\D*(\d+)", engine.lower())
    return f"chain-{match[1]}" if match else engine
