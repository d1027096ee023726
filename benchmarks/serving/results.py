# SPDX-License-Identifier: Apache-2.0
"""A run's measurements, and what follows from them: ratios, medians, spreads.

Everything that compares engines is a ratio to plain decoding in the same round and group, so that
neither drift of the machine nor a split into groups enters. Of plain decoding's two settings the
baseline of a load is the better one there: that whose median ratio to the other one, over all
rounds and groups, is above 1. One setting for all rounds of a load, as a server has one; the faster
one of each round would be a maximum of two noisy numbers, above what either setting gives.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.serving.engines import PLAIN
from benchmarks.serving.journal import Journal


@dataclass(frozen=True)
class Spread:
    """A median over rounds, and how far the rounds lie apart."""

    median: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        """None of nothing."""
        found = list(values)
        if not found:
            return None
        return cls(statistics.median(found), min(found), max(found), len(found))


def place_of(m: Mapping[str, Any]) -> tuple[Any, ...]:
    """Engines are compared with each other in the same one."""
    return m["group"], m["round"], m["temperature"], m["dataset"], m["concurrency"]


def by_place(measurements: Iterable[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """By place and engine. A load that was interrupted is measured again from its first engine
    on: what stands before that is of another sitting, and dropped."""
    places: dict[tuple[Any, ...], dict[str, Any]] = {}
    for m in measurements:
        place = places.setdefault(place_of(m), {})
        if m["engine"] in place:
            place.clear()
        place[m["engine"]] = m
    return places


@dataclass(frozen=True)
class Condition:
    """What a table is about."""

    temperature: float
    dataset: str


class Results:
    """Measurements of a journal by condition, engine and concurrency."""

    def __init__(self, journal: Journal):
        self.settings = journal.settings
        self._places = by_place(journal.measurements)
        self.measurements = [m for place in self._places.values() for m in place.values()]
        self.default: str | None = journal.settings.get("default")
        self.conditions = list(
            dict.fromkeys(Condition(m["temperature"], m["dataset"]) for m in self.measurements)
        )
        self.concurrencies = sorted({m["concurrency"] for m in self.measurements})
        seen = {m["engine"] for m in self.measurements}
        self.engines = [name for name in journal.settings["engines"] if name in seen]
        self.plain = [name for name in self.engines if name in PLAIN]

    def baseline(self, condition: Condition, concurrency: int) -> str:
        """The better setting of plain decoding at this load."""
        first, *others = self.plain or list(PLAIN)[:1]
        best, lead = first, 1.0
        for name in others:
            ratios = [
                m["tokens_per_second"] / theirs["tokens_per_second"]
                for m in self.of(condition, name, concurrency)
                if (theirs := self.beside(m, first))
            ]
            if ratios and statistics.median(ratios) > lead:
                best, lead = name, statistics.median(ratios)
        return best

    def beside(self, m: dict[str, Any], engine: str) -> dict[str, Any] | None:
        """What ``engine`` gave in the same round and group, at the same load."""
        return self._places[place_of(m)].get(engine)

    @property
    def eagle3(self) -> list[str]:
        return [name for name in self.engines if name.startswith("eagle3-")]

    def of(self, condition: Condition, engine: str, concurrency: int) -> list[dict[str, Any]]:
        """All rounds."""
        return [
            m
            for m in self.measurements
            if (m["engine"], m["concurrency"]) == (engine, concurrency)
            and Condition(m["temperature"], m["dataset"]) == condition
        ]

    def speed(self, condition: Condition, engine: str, concurrency: int) -> Spread | None:
        """Tokens per second."""
        return Spread.of(m["tokens_per_second"] for m in self.of(condition, engine, concurrency))

    def ratios(self, condition: Condition, engine: str, concurrency: int) -> dict[int, float]:
        """By round, to the baseline of this load; the median over groups of what is in several."""
        baseline = self.baseline(condition, concurrency)
        found: dict[int, list[float]] = {}
        for m in self.of(condition, engine, concurrency):
            if plain := self.beside(m, baseline):
                ratio = m["tokens_per_second"] / plain["tokens_per_second"]
                found.setdefault(m["round"], []).append(ratio)
        return {number: statistics.median(ratios) for number, ratios in found.items()}

    def ratio(self, condition: Condition, engine: str, concurrency: int) -> Spread | None:
        return Spread.of(self.ratios(condition, engine, concurrency).values())

    def accepted_length(self, condition: Condition, engine: str, concurrency: int) -> float | None:
        """Over all rounds, the bonus token counted; None for plain decoding."""
        counts = [m["drafting"] for m in self.of(condition, engine, concurrency)]
        drafts = sum(c["drafts"] for c in counts)
        return 1 + sum(c["accepted"] for c in counts) / drafts if drafts else None

    def percentile(
        self, condition: Condition, engine: str, concurrency: int, name: str, percent: float
    ) -> float | None:
        """Milliseconds, over the requests of all rounds; ``name`` is tpot or e2e."""
        rounds = self.of(condition, engine, concurrency)
        values = [value for m in rounds for value in m[f"every_{name}_ms"]]
        return float(np.percentile(values, percent)) if values else None

    def step_ms(self, condition: Condition, engine: str, concurrency: int) -> float | None:
        """Wall time of an engine step."""
        rounds = self.of(condition, engine, concurrency)
        steps = sum(m["drafting"]["steps"] for m in rounds)
        return 1000 * sum(m["seconds"] for m in rounds) / steps if steps else None

    def stages(self, condition: Condition, engine: str, concurrency: int) -> dict[str, float]:
        """Milliseconds per step and stage, means over rounds; "rest" is what echo does not time."""
        reports = [m["stages"] for m in self.of(condition, engine, concurrency) if m["stages"]]
        steps = sum(r["steps"] for r in reports)
        whole = self.step_ms(condition, engine, concurrency)
        if not steps or whole is None:
            return {}
        names = dict.fromkeys(name for r in reports for name in r["milliseconds_per_step"])
        times = {
            name: sum(r["steps"] * r["milliseconds_per_step"].get(name, 0.0) for r in reports)
            / steps
            for name in names
        }
        return {**times, "rest": max(0.0, whole - sum(times.values()))}

    def best(self, condition: Condition, engines: Sequence[str], concurrency: int) -> str | None:
        """The fastest by its median ratio."""
        ratios = {name: self.ratio(condition, name, concurrency) for name in engines}
        found = {name: ratio.median for name, ratio in ratios.items() if ratio}
        return max(found, key=lambda name: found[name]) if found else None

    def quotient(
        self, condition: Condition, engine: str, other: str, concurrency: int
    ) -> Spread | None:
        """How many times as fast ``engine`` is as ``other``, round by round."""
        mine = self.ratios(condition, engine, concurrency)
        theirs = self.ratios(condition, other, concurrency)
        return Spread.of(mine[r] / theirs[r] for r in mine if r in theirs)

    def plain_speed(self, condition: Condition, concurrency: int) -> float:
        """Tokens per second of the better plain decoding; 0 where it was not measured."""
        speed = self.speed(condition, self.baseline(condition, concurrency), concurrency)
        return speed.median if speed else 0.0

    def plain_sum(self, condition: Condition) -> float:
        """Tokens per second of the better plain decoding of each load, summed over the sweep."""
        return sum(self.plain_speed(condition, c) for c in self.concurrencies)

    def sums(self, condition: Condition, engine: str) -> dict[int, float]:
        """By round: tokens per second, summed over the sweep; plain decoding's median carries the
        scale. Only rounds in which no load is missing."""
        loads = {c: self.ratios(condition, engine, c) for c in self.concurrencies}
        complete = set.intersection(*(set(ratios) for ratios in loads.values()))
        return {
            r: sum(ratios[r] * self.plain_speed(condition, c) for c, ratios in loads.items())
            for r in sorted(complete)
        }

    def sum_quotient(self, condition: Condition, engine: str, other: str) -> Spread | None:
        mine, theirs = self.sums(condition, engine), self.sums(condition, other)
        return Spread.of(mine[r] / theirs[r] for r in mine if r in theirs)
