# SPDX-License-Identifier: Apache-2.0
"""What is measured, in which order, and how long the rest will take."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.serving.engines import BASELINE, ECHO_SERVER, Lineup
from benchmarks.serving.errors import BenchmarkError


@dataclass(frozen=True)
class Measurement:
    """One engine at one load in one round."""

    group: int
    round: int
    temperature: float
    dataset: str
    concurrency: int
    engine: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Sizes:
    """How much work a measurement is."""

    min_requests: int = 12
    requests_per_slot: float = 3
    max_requests: int = 192
    output_tokens: int = 128

    def requests(self, concurrency: int) -> int:
        """Enough that most of the time ``concurrency`` requests run; never fewer than that."""
        wanted = max(self.min_requests, round(self.requests_per_slot * concurrency))
        return max(concurrency, min(wanted, self.max_requests))


@dataclass(frozen=True)
class Sweep:
    """The loads of every round."""

    rounds: int
    temperatures: Sequence[float]
    datasets: Sequence[str]
    concurrencies: Sequence[int]


def schedule(lineup: Lineup, groups: Sequence[Sequence[str]], sweep: Sweep) -> list[Measurement]:
    """All measurements, group by group. Within a round every load visits all engines before the
    next load; every second round visits them the other way round, so that what drifts steadily
    touches all of them alike."""
    plan = []
    for group, servers in enumerate(groups):
        engines = [engine.name for engine in lineup.engines if engine.server in servers]
        for number in range(sweep.rounds):
            order = engines if number % 2 == 0 else engines[::-1]
            plan += [
                Measurement(group, number, temperature, dataset, concurrency, engine)
                for temperature in sweep.temperatures
                for dataset in sweep.datasets
                for concurrency in sweep.concurrencies
                for engine in order
            ]
    return plan


def split_into_groups(servers: Sequence[str], capacity: int) -> list[list[str]]:
    """Servers that run at the same time, at most ``capacity``; every group has a baseline of its
    own, and echo is in the first, beside as many others as fit."""
    others = [name for name in servers if name != BASELINE]
    others.sort(key=lambda name: name != ECHO_SERVER)
    if not others:
        return [[BASELINE]]
    room = capacity - 1
    if room < 1:
        raise BenchmarkError(
            "the free memory holds fewer than two servers; end other programs, or choose a "
            "smaller --kv-gib"
        )
    num_groups = -(-len(others) // room)
    share = -(-len(others) // num_groups)
    return [[BASELINE, *others[start : start + share]] for start in range(0, len(others), share)]


def kv_tokens_needed(
    concurrency: int, mean_prompt_tokens: float, output_tokens: int, block_size: int = 128
) -> int:
    """KV slots with which ``concurrency`` requests run without being preempted, bar bad luck."""
    return round(concurrency * (1.2 * mean_prompt_tokens + output_tokens + block_size / 2))


@dataclass
class Estimate:
    """Seconds of measurements, learnt from those that are done."""

    sizes: Sizes
    overhead: float = 0.3
    """Of a measurement, besides its requests."""
    _seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def learn(self, concurrency: int, seconds: float) -> None:
        self._seconds[concurrency].append(seconds)

    def seconds(self, concurrency: int) -> float:
        """Of one measurement at a load: the mean of those seen, else scaled from another load's,
        else a guess for a small model on a small machine."""
        seen = self._seconds.get(concurrency)
        if seen:
            return sum(seen) / len(seen) + self.overhead
        factors = [
            sum(values) / len(values) / self._guess(load) for load, values in self._seconds.items()
        ]
        factor = sum(factors) / len(factors) if factors else 1.0
        return self._guess(concurrency) * factor + self.overhead

    def total(self, plan: Iterable[Measurement]) -> float:
        return sum(self.seconds(item.concurrency) for item in plan)

    def _guess(self, concurrency: int) -> float:
        tokens_per_second = 60 * concurrency**0.6
        return self.sizes.requests(concurrency) * self.sizes.output_tokens / tokens_per_second


def next_round_fits(
    plan: Sequence[Measurement], position: int, estimate: Estimate, seconds_left: float
) -> bool:
    """May the round that begins at ``position`` begin? The first round of a group always may."""
    item = plan[position]
    if item.round == 0:
        return True
    this_round = [p for p in plan[position:] if (p.group, p.round) == (item.group, item.round)]
    return estimate.total(this_round) <= seconds_left


def by_key(records: Iterable[Mapping[str, Any]]) -> set[Measurement]:
    """What is done, of a run that goes on."""
    names = list(Measurement.__dataclass_fields__)
    return {Measurement(**{name: record[name] for name in names}) for record in records}
