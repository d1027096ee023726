# SPDX-License-Identifier: Apache-2.0
"""The cost curve, checked and corrected while it serves.

A curve can be wrong: a bad file, a busy machine while it was measured, a processor that has become
hot. Decisions depend on its ratios only: what candidates and drafting cost, in plain steps of the
same load. So that is what is measured, by *trials*: within a few dozen steps of one load some are
plain and some carry candidates, all on the machine as it is at that time. Steps with prompts say
nothing, so a trial goes on until it has enough of the others. It is held when a load is met for
the first time, when steps begin to take longer or shorter than they did, and else ever more rarely.
Its outcome, where it departs from the curve by more than its noise, becomes the load's own curve.
A guard beside it needs no model: where the milliseconds of an output token are more with drafts
than without, nothing is drafted until a later trial finds otherwise.

Nothing here reads a clock. Times are given by one rank (``add``), which judges (``judge``); what it
finds travels to the others (``apply``). Everything else depends on loads, counts of steps and
verdicts alone, so all ranks decide the same.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from math import log, log2, sqrt
from statistics import median

from vllm_echo.core.budget import Offer
from vllm_echo.core.cost import CostCurve, Line, StepLoad
from vllm_echo.core.trial import Correction, StepTimes, Trial, evaluate, level_of

FIRST_TRIAL = 12
TRIAL = 24
"""Clean steps of a load's first trial, and of a later one."""
_OF_A_KIND = 4
"""Fewest of them that are plain, and that carry candidates."""
_LONGEST_TRIAL = 120
"""Steps, clean or not, after which a trial is over in any case."""
_WARM_UP = 3
"""Steps of a load before its first trial: sizes that were never met are slow once."""
FIRST_GAP, LAST_GAP = 32, 1024
"""Steps of a load between trials: doubled from one to the other while nothing departs."""
LAST_GAP_OFF = 256
"""The same where the guard holds drafting back: traffic changes sooner than machines do."""
LEVEL_EVERY = 64
"""Steps between two looks at the level of steps."""
LEVEL_DEPARTS = log(1.15)
_LEVEL_LOOKS = 2
_FEW_STEPS = 16
_HISTORY = 5
_MOST_SAMPLES = 256

DEPARTS = 0.03
"""Share of a plain step by which a cost departs, where the noise of a trial is less than that."""
_NOISES = 2.5
_GUARD_STEPS = 40
_BACK_STEPS = 20
_LEAST_GAIN = 1.01
_FADING = 0.7
"""What is left of earlier tokens after a trial, where nothing else is drafted."""
_MEMORY = 512
"""Steps over which tokens are averaged: traffic changes."""
_PROBE_DEPTH = 2


@dataclass(frozen=True)
class Ruling:
    """What a trial, or a look at the level, means for one load; the same on all ranks."""

    correction: Correction
    off: bool
    """Drafting was measured slower than plain decoding."""
    gap: int
    place: int
    """Steps until the next trial, negative; 0 begins one."""
    conclusive: bool = True
    """There has been a trial that said something."""
    messages: tuple[str, ...] = ()


Verdict = dict[int, Ruling]
"""By load class."""


@dataclass
class _Yield:
    """What steps bring whose candidates the curve chose: output tokens of a request, and in trials
    the time that such a step takes, in plain steps."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    steps: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, tokens: float) -> None:
        self.fade(1 - 1 / _MEMORY)
        self.steps += 1
        self.total += tokens
        self.squares += tokens * tokens

    def fade(self, share: float) -> None:
        self.steps, self.total, self.squares = (
            share * value for value in (self.steps, self.total, self.squares)
        )

    @property
    def mean(self) -> float:
        return self.total / self.steps

    @property
    def error(self) -> float:
        """Standard error of ``mean``, relative to it."""
        variance = max(0.0, self.squares / self.steps - self.mean**2)
        return sqrt(variance / self.steps) / self.mean


@dataclass
class _Load:
    """What is known of one class of loads."""

    curve: CostCurve
    """The one that decides: corrected."""
    correction: Correction = field(default_factory=Correction)
    off: bool = False
    gap: int = FIRST_GAP
    place: int = -_WARM_UP
    """Steps since the trial began; negative before."""
    first: bool = True
    """No trial has said anything yet."""
    plain: int = 0
    with_nodes: int = 0
    """Clean steps of the trial."""
    # For the rank that judges:
    samples: deque[StepTimes] = field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))
    trials: deque[Trial] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    tokens: _Yield = field(default_factory=_Yield)
    level: float | None = None
    departed: int = 0
    told: set[str] = field(default_factory=set)

    @property
    def trial_is_over(self) -> bool:
        """It has what it needs, or is not going to get it."""
        if self.place <= 0:
            return False
        clean = self.plain + self.with_nodes
        enough = clean >= (FIRST_TRIAL if self.first else TRIAL)
        if enough and min(self.plain, self.with_nodes) >= _OF_A_KIND:
            return True
        return self.place >= min(_LONGEST_TRIAL, TRIAL * (1 + clean))

    def begin_trial(self) -> None:
        self.samples.clear()
        self.plain = self.with_nodes = 0


def load_class(requests: int) -> int:
    """Loads within a fifth or so of each other are one: half octaves of the requests."""
    return round(2 * log2(requests))


class CostWatch:
    """Follows the steps of a server under ``curve``."""

    def __init__(self, curve: CostCurve):
        self._given = with_floors(curve)
        self._loads: dict[int, _Load] = {}
        self._steps = 0
        self._next_kind = self._kind = "plain"

    # -- on all ranks ---------------------------------------------------------------------

    def curve(self, load: StepLoad) -> CostCurve:
        """What decides about ``load``."""
        return self._at(load.num_requests).curve

    def drafts(self, load: StepLoad, pays: bool) -> bool:
        """Is the step after this one to have candidates? ``pays``: its offer says so. To be called
        once a step; within a trial the answer alternates."""
        state = self._at(load.num_requests)
        usual = pays and not state.off
        drafts = usual
        if load.num_prefill_tokens == 0:
            if state.place == 0:
                state.begin_trial()
            if state.place >= 0:
                drafts = _turn(state.place, state.first, usual)
            state.place += 1
        self._next_kind = "plain" if not drafts else "chosen" if pays else "probe"
        return drafts

    def probing_curve(self, load: StepLoad) -> CostCurve:
        """A curve under which candidates pay that by the given one do not; layers cost what they
        cost."""
        ms = self._given.step_ms(load.num_requests)
        free = Line(0.0, 0.0)
        return CostCurve(((1, ms),), free, self._given.layer, free, free)

    def probe(self, load: StepLoad, offer: Offer) -> Offer:
        """What is drafted under that curve, for a look at what candidates cost: half as many as
        there are requests, and four at least; two layers at most."""
        most = max(4, load.num_requests // 2)
        return replace(
            offer, num_nodes=min(offer.num_nodes, most), depth=min(offer.depth, _PROBE_DEPTH)
        )

    @property
    def due(self) -> bool:
        """After this step, ask one rank to ``judge`` and let all ``apply``."""
        return self._steps % LEVEL_EVERY == 0 or any(s.trial_is_over for s in self._loads.values())

    def apply(self, verdict: Verdict) -> list[str]:
        """Go by ``verdict`` from the next step on; returns what the log should say."""
        messages: list[str] = []
        for key, ruling in verdict.items():
            state = self._loads[key]
            if ruling.correction != state.correction:
                requests = max(1, round(2 ** (key / 2)))
                state.curve = ruling.correction.of(self._given, requests)
            state.correction, state.off = ruling.correction, ruling.off
            state.gap, state.place = ruling.gap, ruling.place
            state.first = state.first and not ruling.conclusive
            messages += ruling.messages
        return messages

    def _at(self, requests: int) -> _Load:
        key = load_class(requests)
        if key not in self._loads:
            self._loads[key] = _Load(self._given)
        return self._loads[key]

    # -- times: on all ranks, looked at by one ---------------------------------------------

    def add(self, step: StepTimes) -> None:
        """One step is over."""
        self._steps += 1
        before, self._kind, self._next_kind = self._kind, self._next_kind, "plain"
        if not step.clean:
            return
        step = replace(step, kind=before)
        state = self._at(step.requests)
        state.samples.append(step)
        if state.place > 0:
            state.plain += step.nodes == 0
            state.with_nodes += step.nodes > 0
        if before == "chosen":
            state.tokens.add(step.tokens / step.requests)

    def judge(self) -> Verdict:
        """What the trials that are over, and the level of the steps, say."""
        verdict: Verdict = {}
        for key, state in self._loads.items():
            if state.trial_is_over:
                verdict[key] = self._rule(key, state)
            elif state.place < 0 and not state.first and self._steps % LEVEL_EVERY == 0:
                messages: list[str] = []
                if self._guard(state, messages, key) != state.off:
                    state.tokens = _Yield()
                    off = not state.off
                    verdict[key] = Ruling(
                        state.correction, off, FIRST_GAP, -FIRST_GAP, messages=tuple(messages)
                    )
                elif self._departed(state):
                    verdict[key] = Ruling(state.correction, state.off, FIRST_GAP, 0)
        return verdict

    def _departed(self, state: _Load) -> bool:
        """Have steps become slower or faster, for longer than an accident?"""
        if state.level is None or len(state.samples) < _FEW_STEPS:
            return False
        now = level_of(state.samples, state.curve)
        state.samples.clear()
        state.departed += 1
        if abs(log(now / state.level)) < LEVEL_DEPARTS:
            state.departed = 0
        return state.departed >= _LEVEL_LOOKS

    def _rule(self, key: int, state: _Load) -> Ruling:
        trial = evaluate(state.samples, self._given)
        if trial is None:
            # Prompts in nearly every step, or requests that may not be drafted for.
            gap = min(2 * state.gap, LAST_GAP)
            return Ruling(state.correction, state.off, gap, -gap, conclusive=False)
        state.departed = 0
        threshold = max(DEPARTS, _NOISES * trial.error)
        if (
            state.trials
            and _between(state.trials).departure(trial.correction, trial) > 2 * threshold
        ):
            state.trials.clear()
        state.trials.append(trial)
        if trial.chosen_time is not None:
            state.tokens.times.append(trial.chosen_time)
        found = _between(state.trials)
        messages: list[str] = []
        last = LAST_GAP_OFF if state.off else LAST_GAP
        correction, gap = state.correction, min(2 * state.gap, last)
        off = self._guard(state, messages, key)
        if off:
            state.tokens.fade(_FADING)
        departs = found.departure(correction, trial) > threshold
        if departs:
            correction = found
            _tell(state, messages, "curve", _about(key, found))
        if departs or off != state.off:
            gap = FIRST_GAP
            state.tokens = _Yield()
        state.level = level_of(state.samples, correction.of(self._given, trial.requests))
        state.samples.clear()
        return Ruling(correction, off, gap, -gap, messages=tuple(messages))

    def _guard(self, state: _Load, messages: list[str], key: int) -> bool:
        """Is drafting off at this load from now on?"""
        found = state.tokens
        if not found.times or found.steps < _BACK_STEPS:
            return state.off
        gain, error = found.mean / median(found.times), found.error
        if state.off:
            return gain * (1 - error) < _LEAST_GAIN
        off = found.steps >= _GUARD_STEPS and gain * (1 + 2 * error) < 1 - DEPARTS / 2
        if off:
            text = (
                f"ECHO: at about {round(2 ** (key / 2))} requests drafting gives {gain:.2f} of the "
                "tokens that plain decoding gives in the same time; nothing is drafted there until "
                "that changes"
            )
            _tell(state, messages, "off", text)
        return off


def with_floors(curve: CostCurve) -> CostCurve:
    """``curve`` with no cost of 0 that is to be corrected by a factor."""
    least = 1e-3 * curve.step[0][1]

    def raised(line: Line) -> Line:
        return Line(max(least, line.fixed), line.each)

    return replace(
        curve,
        roots=raised(curve.roots),
        layer=raised(curve.layer),
        catch_up=raised(curve.catch_up),
    )


def _turn(place: int, first: bool, usual: bool) -> bool:
    """Candidates at this place of a trial? By halves in the first one, when nothing is known; then
    the other way than usual now and then. Drafts come in pairs: the first of them sees to the
    head's KV of all plain steps before it, which says nothing about what drafting costs."""
    if first:
        return place % 6 >= 3
    if usual:
        return place % 6 != 5
    return place % 6 >= 4


def _between(trials: deque[Trial]) -> Correction:
    """The median of those that describe the cost of a candidate in the same way as the last."""
    newest = trials[-1].correction
    alike = [t.correction for t in trials if (t.correction.rise == 1) == (newest.rise == 1)]

    def middle(name: str) -> float:
        return median(getattr(c, name) for c in alike)

    return Correction(middle("rise"), middle("node_ms"), middle("drafting"), middle("catch_up"))


def _tell(state: _Load, messages: list[str], topic: str, text: str) -> None:
    if topic not in state.told:
        state.told.add(topic)
        messages.append(text)


def _about(key: int, found: Correction) -> str:
    nodes = f"{found.rise:.2f} times"
    if found.node_ms:
        nodes = f"{found.node_ms:.2f} ms each beside"
    return (
        f"ECHO: at about {round(2 ** (key / 2))} requests steps depart from the cost curve, and "
        f"decisions go by the steps from now on: measured against a plain step, candidates cost "
        f"{nodes} what the curve says, drafting {found.drafting:.2f} times, the head's catch-up "
        f"{found.catch_up:.2f} times"
    )
