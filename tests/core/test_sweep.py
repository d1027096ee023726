# SPDX-License-Identifier: Apache-2.0
"""Times over sizes, from machines that are known and do other things as well."""

import random
from collections.abc import Callable

import pytest

from vllm_echo.core.sweep import MOST_AGAIN, Sweep, Take, never_falling, take_sweep
from vllm_echo.core.timing import waited_seconds

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REPEATS = 5


def true_ms(rows: int) -> float:
    """Flat for a few rows, then a row costs the same as any other."""
    return 20 + 1.4 * max(0, rows - 4)


class Machine:
    """Takes of a machine with a little noise; ``busy(now)`` is by how much others lengthen a call
    that begins ``now``, in milliseconds since the beginning."""

    def __init__(self, busy: Callable[[float], float] = lambda now: 1.0, seed: int = 0):
        self._busy = busy
        self._source = random.Random(seed)
        self.now = 0.0
        self.calls: list[int] = []

    def take(self, rows: int) -> list[float]:
        self.calls.append(rows)
        times = []
        for _ in range(REPEATS):
            noise = 1 + 0.01 * self._source.random()
            times.append(true_ms(rows) * noise * self._busy(self.now))
            self.now += times[-1]
        return times


def sweep_of(busy: Callable[[float], float], seed: int = 0) -> Sweep:
    return take_sweep(SIZES, Machine(busy, seed).take)


def assert_right(sweep: Sweep, tolerance: float = 0.03) -> None:
    for rows, ms in sweep.points:
        assert ms == pytest.approx(true_ms(rows), rel=tolerance)


def test_a_quiet_machine_is_measured_in_two_passes_up_and_down() -> None:
    machine = Machine()
    sweep = take_sweep(SIZES, machine.take)
    assert machine.calls == [*SIZES, *reversed(SIZES)]
    assert_right(sweep, 0.01)
    assert sweep.disagreement < 1.01


def test_one_spike_spoils_no_size() -> None:
    """Catches a running maximum, which lifts every size behind an early spike: then nodes look
    free."""
    sweep = sweep_of(lambda now: 2.0 if now < 5 * 20 else 1.0)
    assert_right(sweep)
    assert sweep.agree(1.05)


@pytest.mark.parametrize("seed", range(20))
def test_another_process_that_comes_and_goes_is_measured_around_or_said(seed: int) -> None:
    """The bar: whatever agrees is right to a few per cent. Bursts of one to four seconds, a third
    of the time. A median over one pass takes the third of its sizes from the busy machine."""
    source = random.Random(seed)
    bursts, now = [], 0.0
    while now < 200_000:
        now += source.uniform(2000, 8000)
        bursts.append((now, now + source.uniform(1000, 4000)))
        now = bursts[-1][1]
    sweep = sweep_of(lambda t: 1.7 if any(a <= t < b for a, b in bursts) else 1.0, seed)
    if sweep.agree(1.1):
        assert_right(sweep, 0.05)


def test_most_machines_with_bursts_are_measured_all_the_same() -> None:
    """Catches a rule that never agrees, and so stores nothing anywhere."""
    agreed = 0
    for seed in range(20):
        offset = random.Random(seed).uniform(0, 9000)
        sweep = sweep_of(lambda t, offset=offset: 1.7 if (t + offset) % 9000 < 1500 else 1.0, seed)
        agreed += sweep.agree(1.1)
    assert agreed >= 15


def test_passes_that_go_on_disagreeing_say_so() -> None:
    """Every take another time: there is no telling which is right."""
    count = iter(range(1000))
    sweep = take_sweep((1, 2, 4), lambda rows: [20.0 * 1.2 ** next(count)] * REPEATS)
    assert not sweep.agree(1.1)


def test_a_spike_in_both_passes_is_measured_again() -> None:
    """Two takes that agree may both be wrong; the neighbours show it."""
    takes = dict.fromkeys(SIZES, 0)

    def take(rows: int) -> list[float]:
        takes[rows] += 1
        spoilt = rows == 32 and takes[rows] <= 2
        return [true_ms(rows) * (1.5 if spoilt else 1.0)] * REPEATS

    sweep = take_sweep(SIZES, take)
    assert takes[32] > 2 == takes[1]
    assert dict(sweep.points)[32] == pytest.approx(true_ms(32))


def test_a_knee_is_measured_again_and_kept() -> None:
    """It lies off the line through its neighbours, and is right."""
    knee = {1: 20.0, 2: 20.0, 4: 20.0, 8: 20.0, 16: 20.0, 32: 40.0, 64: 80.0}
    calls: list[int] = []

    def take(rows: int) -> list[float]:
        calls.append(rows)
        return [knee[rows]] * REPEATS

    sweep = take_sweep(tuple(knee), take)
    assert calls.count(16) == 3
    assert dict(sweep.points) == pytest.approx(knee)


def test_no_size_is_measured_for_ever() -> None:
    source = random.Random(0)
    calls: list[int] = []

    def take(rows: int) -> list[float]:
        calls.append(rows)
        return [source.uniform(1, 100)] * REPEATS

    take_sweep((1, 2, 4, 8), take)
    assert max(map(calls.count, (1, 2, 4, 8))) <= 2 + MOST_AGAIN


def test_a_value_that_is_too_high_is_pooled_with_what_comes_after_it() -> None:
    assert never_falling([1.0, 4.0, 2.0, 3.0, 5.0], [1.0] * 5) == pytest.approx([1, 3, 3, 3, 5])
    assert never_falling([4.0, 1.0], [1.0, 3.0]) == pytest.approx([1.75, 1.75])
    assert never_falling([2.0], [1.0]) == [2.0]


def test_one_size_is_a_sweep() -> None:
    take: Take = lambda rows: [2.0] * REPEATS  # noqa: E731
    assert take_sweep((1,), take) == Sweep(((1, 2.0),), 1.0)


def test_a_thread_knows_how_long_it_had_no_core() -> None:
    before = waited_seconds()
    assert 0 <= before <= waited_seconds()
