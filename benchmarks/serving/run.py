# SPDX-License-Identifier: Apache-2.0
"""Carries out a plan: servers up, measurements in order, results into the journal."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.serving import client, counters
from benchmarks.serving.datasets import Prompts
from benchmarks.serving.engines import ECHO_SERVER, PLAIN, Engine, Lineup
from benchmarks.serving.errors import BenchmarkError
from benchmarks.serving.fleet import Fleet
from benchmarks.serving.journal import Journal
from benchmarks.serving.plan import Estimate, Measurement, Sizes, next_round_fits, still_to_measure
from benchmarks.serving.servers import MODEL_NAME, Server, Serving
from benchmarks.serving.sizing import server_bytes

WARM_UP_PROMPT = "Count from one to one hundred."
WARM_UP_TOKENS = 16


@dataclass
class Bench:
    """Everything that a run needs."""

    lineup: Lineup
    groups: Sequence[Sequence[str]]
    plan: Sequence[Measurement]
    prompts: Mapping[str, Prompts]
    sizes: Sizes
    serving: Serving
    seed: int
    port: int
    at_once: int
    minutes: float | None
    folder: Path
    journal: Journal

    def run(self) -> None:
        """All of the plan that is not in the journal yet."""
        self.estimate = Estimate(self.sizes)
        for record in self.journal.measurements:
            self.estimate.learn(record["concurrency"], record["seconds"])
        self.schedules_ahead: dict[str, bool] = {}
        self.started = time.monotonic()
        for group, items in groupby(self.plan, key=lambda item: item.group):
            left = self._left(items)
            if left:
                self._run_group(group, left)
        self.journal.add("complete", {})

    def _left(self, plan: Iterable[Measurement]) -> list[Measurement]:
        return still_to_measure(plan, self.journal.measurements)

    def _run_group(self, group: int, plan: Sequence[Measurement]) -> None:
        configs = {name: self.lineup.servers[name] for name in self.groups[group]}
        config = next((c for c in configs.values() if c is not None), None)
        needed = server_bytes(self.serving.model, config, self.serving.kv_bytes)
        with Fleet() as fleet:
            fleet.start(
                configs, self.serving, self.port, self.folder, self.at_once, needed, self.say
            )
            self._warm_up(fleet)
            held = sum(counters.proportional_memory(s.pids) for s in fleet.servers.values())
            self.say(f"{len(configs)} servers hold {held / 2**30:.1f} GiB")
            self._measure_all(fleet, group, plan)

    def _warm_up(self, fleet: Fleet) -> None:
        """At the highest load: what a server prepares when it meets a batch of a new size should
        not be part of its first measurement."""
        most = max(item.concurrency for item in self.plan)
        load = client.Load([WARM_UP_PROMPT] * most, most, most, WARM_UP_TOKENS, 0.0, self.seed)
        for engine in self.lineup.engines:
            server = fleet.servers.get(engine.server)
            if server is not None:
                self.say(f"warming up {engine.name}")
                server.go_on()
                self._switch(server, engine)
                self._send(server, load)
                if engine.name in PLAIN:
                    self.schedules_ahead[engine.name] = server.schedules_ahead()
                server.halt()

    def _measure_all(self, fleet: Fleet, group: int, plan: Sequence[Measurement]) -> None:
        round_before = None
        for position, item in enumerate(plan):
            if item.round != round_before:
                seconds_left = self._seconds_left(group)
                if not next_round_fits(plan, position, self.estimate, seconds_left):
                    self.say(f"no time for round {item.round + 1}; {item.round} are done")
                    return
                round_before = item.round
            self._progress(item, plan[position:])
            server = fleet.servers[self.lineup.engine(item.engine).server]
            record = self.measure(server, item, fleet)
            self.estimate.learn(item.concurrency, record["seconds"])
            self.journal.add("measurement", {**item.to_dict(), **record})

    def _seconds_left(self, group: int) -> float:
        """Each group may use its share of the time limit."""
        if self.minutes is None:
            return float("inf")
        share = (group + 1) / len(self.groups)
        return self.started + 60 * self.minutes * share - time.monotonic()

    def measure(self, server: Server, item: Measurement, fleet: Fleet) -> dict[str, Any]:
        """One line of the journal."""
        server.go_on()
        self._switch(server, self.lineup.engine(item.engine))
        prompts = self.prompts[item.dataset]
        count = self.sizes.requests(item.concurrency, len(prompts.sets))
        load = client.Load(
            prompts=prompts.starting_at(item.round * count),
            requests=count,
            concurrency=item.concurrency,
            output_tokens=self.sizes.output_tokens,
            temperature=item.temperature,
            seed=self.seed + item.round * count,
        )
        pids = server.pids
        others = [pid for s in fleet.servers.values() if s is not server for pid in s.pids]
        before, stages = server.metrics(), counters.read_stages(server.stages)
        processors = _processor_times(pids, others)
        record = self._send(server, load)
        seconds = record["seconds"]
        spent = [
            now - then for now, then in zip(_processor_times(pids, others), processors, strict=True)
        ]
        record |= {
            "drafting": counters.drafting(before, server.metrics()),
            "stages": counters.stage_difference(stages, counters.read_stages(server.stages)),
            "busy_cores": {
                "server": spent[0] / seconds,
                "idle_servers": spent[1] / seconds,
                # of everything that is not part of this benchmark
                "others": max(0.0, spent[3] - spent[0] - spent[1] - spent[2]) / seconds,
            },
        }
        if item.engine in self.schedules_ahead:
            record["schedules_ahead"] = self.schedules_ahead[item.engine]
        server.settle()
        server.halt()
        return record

    def _switch(self, server: Server, engine: Engine) -> None:
        if engine.server == ECHO_SERVER:
            server.switch(engine.options or {})

    def _send(self, server: Server, load: client.Load) -> dict[str, Any]:
        try:
            return client.send(server.url, MODEL_NAME, load)
        except OSError as error:
            time.sleep(1)
            server.require_alive()
            raise BenchmarkError(f"{server.name}: {error}; see {server.log}") from None

    def _progress(self, item: Measurement, left: Sequence[Measurement]) -> None:
        remaining = self.estimate.total(left)
        remaining += sum(
            self.estimate.total(self._left(p for p in self.plan if p.group == group))
            for group in range(item.group + 1, len(self.groups))
        )
        # A round that has begun is finished, whatever the time limit.
        this_round = self.estimate.total(p for p in left if p.round == item.round)
        limit = max(this_round, self._seconds_left(len(self.groups) - 1))
        self.say(
            f"round {item.round + 1}, T = {item.temperature:g}, {item.dataset}, "
            f"c = {item.concurrency}: {item.engine} (about {_clock(min(remaining, limit))} left)"
        )

    def say(self, text: str) -> None:
        elapsed = _clock(time.monotonic() - self.started)
        print(f"[bench {elapsed}] {text}", file=sys.stderr, flush=True)


def _processor_times(pids: Sequence[int], others: Sequence[int]) -> tuple[float, ...]:
    """Of the measured server, of the halted ones, of this process, of the whole machine."""
    return (
        counters.processor_seconds(pids),
        counters.processor_seconds(others),
        time.process_time(),
        counters.busy_seconds(),
    )


def _clock(seconds: float) -> str:
    seconds = max(0, int(seconds))
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"
