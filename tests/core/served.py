# SPDX-License-Identifier: Apache-2.0
"""A server that is not there: steps of a machine with a known cost curve, under the pipeline's own
offers and the watch that corrects them."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import sin

import torch

from tests.core.machines import TWO_CORES
from vllm_echo.core.acceptance import SupplyPoint, uncalibrated
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import CostCurve, Line, StepLoad
from vllm_echo.core.pipeline import EchoPipeline
from vllm_echo.core.trial import StepTimes

SUPPLY = {(p.price, p.depth): p for p in uncalibrated().greedy.supply}
TRUE = TWO_CORES


def with_rise(curve: CostCurve, factor: float) -> CostCurve:
    """What rows add to a step of one, times ``factor``."""
    first = curve.step[0][1]
    step = tuple((rows, first + factor * (ms - first)) for rows, ms in curve.step)
    return replace(curve, step=step, control=Line(curve.control.fixed, 0.0))


SPOILT = {
    "flat": with_rise(TRUE, 0.0),
    "ten times too dear": with_rise(TRUE, 10.0),
    "ten times too cheap": with_rise(TRUE, 0.1),
}


@dataclass
class Machine:
    """Times of steps. ``others(seconds)`` is by how much other processes lengthen them."""

    curve: CostCurve = TRUE
    noise: float = 0.03
    spikes: float = 0.02
    others: Callable[[float], float] = lambda seconds: 1.0
    source: random.Random = field(default_factory=lambda: random.Random(0))

    def time(self, ms: float, seconds: float) -> float:
        long = self.source.uniform(2, 6) if self.source.random() < self.spikes else 1.0
        noise = max(0.5, self.source.gauss(1, self.noise))
        return ms * noise * long * self.others(seconds)


@dataclass
class Totals:
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    drafting: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Server:
    """``echo`` under ``curve``. ``yields``: of what the calibration promises, how much is accepted
    in truth."""

    def __init__(
        self,
        curve: CostCurve,
        machine: Machine,
        watch: bool = True,
        yields: float = 1.0,
        prompts: float = 0.0,
    ):
        config = EchoConfig(policy="echo", gates=(), profile=curve, watch_costs=watch)
        self.pipeline = EchoPipeline(config, 256, torch.device("cpu"))
        self.machine = machine
        self.seconds = 0.0
        self.messages: list[str] = []
        self.verdicts = 0
        self._yields, self._prompts = yields, prompts
        self._nodes, self._accepted, self._waiting = 0, 0.0, False

    def serve(self, requests: Callable[[], int], seconds: float) -> Totals:
        """Steps of ``requests()`` requests each, for so long."""
        totals, end = Totals(), self.seconds + seconds
        while self.seconds < end:
            self._step(requests(), totals)
        return totals

    def _step(self, requests: int, totals: Totals) -> None:
        source, curve = self.machine.source, self.machine.curve
        load = StepLoad(requests, 0, 300 * requests)
        nodes = min(self._nodes, 8 * requests)
        target = curve.plain_ms(load)
        if nodes:
            target += curve.control.fixed + curve.nodes_ms(load, nodes)
        dirty = source.random() < self._prompts
        target += curve.step_ms(100 + requests) if dirty else 0.0
        accepted = sum(source.random() < self._accepted / max(1, nodes) for _ in range(nodes))
        offer = self.pipeline.offer(load)
        catch_up, draft, layers, expanded = 0.2, 0.01, 0, 0
        drafted = requests if offer.num_nodes else 0
        self._nodes = offer.num_nodes
        if drafted:
            point = SUPPLY[offer.price, offer.depth]
            layers, expanded, draft = self._draft(requests, point)
            # The head's KV of plain steps is written with the first draft behind them.
            catch_up += curve.catch_up(requests) + (1.5 if self._waiting else 0.0)
            self._accepted = self._yields * point.accepted * offer.num_nodes / point.nodes
        self._waiting = not drafted
        times = [self.machine.time(ms, self.seconds) for ms in (target, catch_up, draft)]
        totals.steps += 1
        totals.drafting += bool(drafted)
        totals.tokens += requests + accepted
        totals.seconds += sum(times) / 1000
        self.seconds += sum(times) / 1000
        step = StepTimes(
            requests=requests,
            context=load.num_context_tokens,
            nodes=nodes,
            tokens=requests + accepted,
            target_ms=times[0],
            catch_up_ms=times[1],
            draft_ms=times[2],
            drafted=drafted,
            layers=layers,
            expanded=expanded,
            clean=not dirty,
        )
        self._watch(step)

    def _draft(self, requests: int, point: SupplyPoint) -> tuple[int, int, float]:
        source, curve = self.machine.source, self.machine.curve
        widths = self.pipeline.policy.shape.frontier_widths
        layers, expanded, ms = 0, 0, curve.roots(requests)
        for chance, width in zip(point.layers, widths, strict=False):
            nodes = width * sum(source.random() < chance for _ in range(requests))
            if nodes:
                layers, expanded, ms = layers + 1, expanded + nodes, ms + curve.layer(nodes)
        return layers, expanded, ms

    def _watch(self, step: StepTimes) -> None:
        watch = self.pipeline.watch
        if watch is not None:
            watch.add(step)
            if watch.due:
                self.verdicts += 1
                self.messages += watch.apply(watch.judge())


def drifting(seconds: float) -> float:
    """A quarter slower and faster again within minutes."""
    return 1.12 + 0.12 * sin(seconds / 40)


def plain_rate(machine: Machine, requests: int, seconds: float) -> float:
    """Tokens a second without speculation, on a machine of the same kind."""
    load = StepLoad(requests, 0, 300 * requests)
    now, tokens = 0.0, 0
    while now < seconds:
        now += machine.time(machine.curve.plain_ms(load) + 0.2, now) / 1000
        tokens += requests
    return tokens / now
