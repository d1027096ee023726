# SPDX-License-Identifier: Apache-2.0
"""What is measured, in which order, and how long the rest will take."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from benchmarks.serving.engines import ECHO_SERVER, PLAIN, Lineup
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

    @property
    def place(self) -> tuple[int, int, float, str, int]:
        """Engines are compared with each other in the same one."""
        return self.group, self.round, self.temperature, self.dataset, self.concurrency

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Sizes:
    """How much work a measurement is."""

    min_requests: int = 12
    requests_per_slot: float = 3
    max_requests: int = 192
    output_tokens: int = 128

    def requests(self, concurrency: int, num_sets: int = 1) -> int:
        """Those that are waited for, never fewer than ``concurrency``: as many of each of
        ``num_sets`` sets, so that every measurement has the same mixture."""
        wanted = max(self.min_requests, round(self.requests_per_slot * concurrency))
        wanted = max(concurrency, min(wanted, self.max_requests))
        return -(-wanted // num_sets) * num_sets


@dataclass(frozen=True)
class Sweep:
    """The loads of every round."""

    rounds: int
    temperatures: Sequence[float]
    datasets: Sequence[str]
    concurrencies: Sequence[int]


def schedule(lineup: Lineup, groups: Sequence[Sequence[str]], sweep: Sweep) -> list[Measurement]:
    """All measurements, group by group. Within a round every load visits all engines before the
    next load, in an order of its own."""
    plan = []
    for group, servers in enumerate(groups):
        engines = [engine.name for engine in lineup.engines if engine.server in servers]
        for number in range(sweep.rounds):
            loads = product(sweep.temperatures, sweep.datasets, sweep.concurrencies)
            for position, (temperature, dataset, concurrency) in enumerate(loads):
                plan += [
                    Measurement(group, number, temperature, dataset, concurrency, engine)
                    for engine in visiting_order(engines, number + position)
                ]
    return plan


def visiting_order(engines: Sequence[str], number: int) -> list[str]:
    """Row ``number`` of a Williams square: each engine takes each place in turn, and follows
    another one in every row (of an odd number of engines: at most two rows alike), so that neither
    drift nor what the engine before left behind falls upon the same one every time."""
    count = len(engines)
    zigzag = [-(-place // 2) * (1 if place % 2 else -1) for place in range(count)]
    return [engines[(step + number) % count] for step in zigzag]


def split_into_groups(servers: Sequence[str], capacity: int) -> list[list[str]]:
    """Servers that run at the same time, at most ``capacity``; every group has plain decoding of
    its own, and echo is in the first, beside as many others as fit."""
    plain = [name for name in servers if name in PLAIN]
    others = [name for name in servers if name not in PLAIN]
    others.sort(key=lambda name: name != ECHO_SERVER)
    room = capacity - len(plain)
    if room < min(1, len(others)):
        raise BenchmarkError(
            f"the free memory holds {max(0, capacity)} servers, and {len(plain) + 1} are the "
            "fewest that can be compared; end other programs, or choose a smaller --kv-gib"
        )
    if not others:
        return [plain]
    num_groups = -(-len(others) // room)
    share = -(-len(others) // num_groups)
    return [[*plain, *others[start : start + share]] for start in range(0, len(others), share)]


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


def still_to_measure(
    plan: Iterable[Measurement], records: Iterable[Mapping[str, Any]]
) -> list[Measurement]:
    """What a run that goes on has before it. Where it was interrupted in the middle of a load, all
    of that load: engines are compared within one sitting only."""
    names = list(Measurement.__dataclass_fields__)
    done = {Measurement(**{name: record[name] for name in names}) for record in records}
    plan = list(plan)
    incomplete = {item.place for item in plan if item not in done}
    return [item for item in plan if item.place in incomplete]
