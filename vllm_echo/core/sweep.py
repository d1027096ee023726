# SPDX-License-Identifier: Apache-2.0
"""Times over sizes, taken on a machine that may be doing other things as well.

What others do only ever adds to a time, and comes and goes. So every size is measured in two
passes, up and down, which puts its two takes far apart; what counts is the lower quartile of all
its times; and a size is taken again while its best takes disagree, or once where it lies off the
line through its neighbours. Where they go on disagreeing there is no answer: `Sweep.agree`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression

from vllm_echo.core.timing import lower_quartile

Take = Callable[[int], list[float]]
"""size -> milliseconds of a few calls, one after the other."""

Points = tuple[tuple[int, float], ...]

AGREEING = 1.05
"""Two takes of a size agree when the slower one is no more than this over the other."""
OFF_LINE = 1.15
"""A size is doubted when it differs by this from the line through its neighbours."""
MOST_AGAIN = 3
"""Most further takes of a size."""


@dataclass(frozen=True)
class Sweep:
    """Milliseconds over sizes."""

    points: Points
    """(size, ms), sizes ascending, times never falling."""
    disagreement: float
    """Over all sizes the largest quotient of a size's two best takes; 1 on a quiet machine."""

    def agree(self, limit: float) -> bool:
        """Do the passes tell the same?"""
        return self.disagreement <= limit


def take_sweep(sizes: Sequence[int], take: Take) -> Sweep:
    """Measure ``sizes``, ascending. The order of takes depends on what they return: where several
    ranks take part, all have to be given the same times."""
    takes: dict[int, list[list[float]]] = {size: [] for size in sizes}
    for size in (*sizes, *reversed(sizes)):
        takes[size].append(take(size))
    off_line = _off_line({size: _time(found) for size, found in takes.items()})
    for _ in range(MOST_AGAIN):
        doubted = [s for s in sizes if s in off_line or _disagreement(takes[s]) > AGREEING]
        for size in doubted:
            takes[size].append(take(size))
        off_line = set()  # a knee is off its line, too, and stays there
    times = [_time(takes[size]) for size in sizes]
    # Errors are relative to the time, and shrink with the number of takes.
    weights = [len(takes[size]) / ms**2 for size, ms in zip(sizes, times, strict=True)]
    return Sweep(
        points=tuple(zip(sizes, never_falling(times, weights), strict=True)),
        disagreement=max(_disagreement(found) for found in takes.values()),
    )


def never_falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The closest values that never fall, by weighted least squares (pool adjacent violators). A
    running maximum would let one value that is too high lift all that come after it."""
    found = isotonic_regression(np.asarray(values), weights=np.asarray(weights))
    return [float(value) for value in found.x]


def _time(takes: Sequence[Sequence[float]]) -> float:
    return lower_quartile([ms for times in takes for ms in times])


def _disagreement(takes: Sequence[Sequence[float]]) -> float:
    best, second, *_ = sorted(lower_quartile(times) for times in takes)
    return second / best


def _off_line(times: dict[int, float]) -> set[int]:
    """Where a size lies off the line through its neighbours, one of the three is wrong, or it is a
    knee."""
    doubted: set[int] = set()
    points = list(times.items())
    for low, (size, ms), high in zip(points, points[1:], points[2:], strict=False):
        (x0, y0), (x1, y1) = low, high
        line = y0 + (y1 - y0) * (size - x0) / (x1 - x0)
        if not 1 / OFF_LINE < ms / line < OFF_LINE:
            doubted |= {x0, size, x1}
    return doubted
