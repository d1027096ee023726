# SPDX-License-Identifier: Apache-2.0
"""Cost curves of machines, and heads of any quality."""

import random

from vllm_echo.core.acceptance import AcceptanceModel, Calibration, uncalibrated
from vllm_echo.core.cost import CostCurve, Line

FREE = CostCurve(((1, 20.0),), *[Line(0.0, 0.0)] * 4)
"""A machine on which nodes and drafting cost nothing."""
MACHINE = CostCurve(
    ((1, 20.0), (16, 21.0), (64, 40.0), (256, 200.0)),
    roots=Line(0.2, 0.01),
    layer=Line(0.2, 0.01),
    catch_up=Line(0.2, 0.01),
    control=Line(0.1, 0.001),
)
"""A machine on which drafting pays for a few requests."""

TWO_CORES = CostCurve(
    step=((1, 20.0), (2, 20.5), (4, 22.0), (8, 26.0), (16, 36.0), (32, 58.0), (64, 104.0)),
    roots=Line(0.8, 0.06),
    layer=Line(1.5, 0.09),
    catch_up=Line(0.6, 0.05),
    control=Line(0.7, 0.02),
    context_us=0.5,
    node_context_us=0.1,
)
"""Two cores and a small model, more or less."""


def random_curve(source: random.Random) -> CostCurve:
    """A machine: flat for a while, then dearer and dearer."""
    rows, ms, slope = 1, source.choice([2.0, 20.0]), 0.0
    points = [(rows, ms)]
    for _ in range(source.randint(0, 5)):
        step = source.choice([1, 8, 64])
        slope += source.choice([0.0, 0.01, 0.1, 0.5])
        rows, ms = rows + step, ms + slope * step
        points.append((rows, ms))
    lines = [Line(source.choice([0.0, 0.1, 1.0]), source.choice([0.0, 0.02])) for _ in range(4)]
    return CostCurve(tuple(points), *lines, *(source.choice([0.0, 0.05]) for _ in "rn"))


def random_calibration(source: random.Random) -> Calibration:
    """A head of any quality; what it supplies is that of the uncalibrated one."""

    def model() -> AcceptanceModel:
        depths = source.randint(1, 5)
        return AcceptanceModel(
            tuple((source.uniform(-2, 2), source.uniform(0.3, 2)) for _ in range(depths)),
            tuple(source.uniform(0, 1) for _ in range(source.randint(1, 5))),
            uncalibrated().greedy.supply,
        )

    return Calibration(model(), model())
