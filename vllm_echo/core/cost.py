# SPDX-License-Identifier: Apache-2.0
"""What a step costs on this machine: the curve that `vllm-echo profile` measures.

The paper models verification as T(K) = T_ar * (1 + gamma * max(0, K - K_max)). A measured
curve says more: it has no single knee on many machines, and it starts at the rows that a step
carries anyway (one root a request, prefill tokens), so what a candidate costs depends on load.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from vllm_echo.core.checks import check_int, check_keys, check_number, check_numbers, check_type
from vllm_echo.errors import EchoConfigError


@dataclass(frozen=True)
class Line:
    """Milliseconds of n items: fixed + each * n."""

    fixed: float
    each: float

    def __call__(self, items: float) -> float:
        return self.fixed + self.each * items


@dataclass(frozen=True)
class StepLoad:
    """What the next step carries before any candidate; known when drafting begins."""

    num_requests: int
    """Requests that decode: one root row each."""
    num_prefill_tokens: int = 0
    """Prompt rows of requests that are still being prefilled."""
    num_context_tokens: int = 0
    """Context of the decoding requests, summed."""

    @property
    def num_rows(self) -> int:
        return self.num_requests + self.num_prefill_tokens


@dataclass(frozen=True)
class CostCurve:
    """Wall milliseconds of a step's parts, as the engine sees them."""

    step: tuple[tuple[int, float], ...]
    """(rows, ms) of a whole step without drafting, rows ascending; linear in between, before the
    first pair as there, and beyond the last one as between the last two."""
    roots: Line
    """First candidates of n requests (the head's output layer)."""
    layer: Line
    """One more layer: a draft forward over n nodes, and its output layer."""
    catch_up: Line
    """What a drafting step pays anyway: the head over n final rows."""
    control: Line
    """Packing, acceptance and commit of n nodes, beyond a plain step."""
    context_us: float = 0.0
    """Microseconds that a request costs for each token of its context."""
    node_context_us: float = 0.0
    """Microseconds that a candidate adds for each token of its request's context: far less, where
    a request's rows share one pass over it."""

    def step_ms(self, rows: float) -> float:
        """Milliseconds of a plain step with ``rows`` rows."""
        points = self.step
        if len(points) == 1 or rows <= points[0][0]:
            return points[0][1]
        high = min(max(1, bisect_right(points, rows, key=lambda p: p[0])), len(points) - 1)
        (x0, y0), (x1, y1) = points[high - 1], points[high]
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)

    def nodes_ms(self, load: StepLoad, num_nodes: float) -> float:
        """Milliseconds that ``num_nodes`` candidates add to the step of ``load``."""
        if num_nodes <= 0:
            return 0.0
        rows = load.num_rows
        added = self.step_ms(rows + num_nodes) - self.step_ms(rows)
        return max(0.0, added + self.per_node_ms(load) * num_nodes)

    def per_node_ms(self, load: StepLoad) -> float:
        """The part of a candidate's cost that is its own: its context and its bookkeeping."""
        mean_context = load.num_context_tokens / max(1, load.num_requests)
        return self.node_context_us / 1000 * mean_context + self.control.each

    def plain_ms(self, load: StepLoad) -> float:
        """Milliseconds of the decoding part of ``load``. Prefill rows are left out: they have
        to be paid in some step, whatever the candidates yield."""
        attention = self.context_us / 1000 * load.num_context_tokens
        return self.step_ms(load.num_requests) + attention

    def knee(self) -> int:
        """Rows up to which a step is flat: the K_max of the paper's hinge, by least squares (of
        relative errors) of T = T_ar * (1 + gamma * max(0, rows - knee)) over the curve's points."""

        def error(knee: int) -> float:
            hinge = [max(0, rows - knee) for rows, _ in self.step]
            return _residual(hinge, [ms for _, ms in self.step])

        # Of equally good knees the last: a curve that never rises is flat to its end.
        return min((error(rows), -rows) for rows, _ in self.step)[1] * -1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the inverse of ``from_dict``."""
        return {
            "step": [list(point) for point in self.step],
            **{name: [getattr(self, name).fixed, getattr(self, name).each] for name in _LINES},
            **{name: getattr(self, name) for name in _CONTEXT},
        }

    @classmethod
    def from_dict(cls, value: Any, path: str) -> "CostCurve":
        """Read and check ``value``; ``path`` is its key, for messages."""
        remedy = "write it with `vllm-echo profile`"
        check_type(path, value, Mapping, f"an object; {remedy}")
        check_keys(path, value, [f.name for f in fields(cls)], remedy, optional=_CONTEXT)
        points = value["step"]
        check_type(f"{path}.step", points, (list, tuple), f"a list of [rows, ms]; {remedy}")
        if not points:
            raise EchoConfigError(f"{path}.step: is empty; {remedy}")
        for index, point in enumerate(points):
            key, meaning = f"{path}.step[{index}]", "[rows, milliseconds]"
            check_numbers(key, point, 2, meaning)
            check_int(key, point[0], 1, None, "rows of a step")
            if point[1] <= 0:
                raise EchoConfigError(f"{key}: {point[1]} ms is no time above 0; {remedy}")
            if index and point[0] <= points[index - 1][0]:
                raise EchoConfigError(f"{path}.step[{index}]: rows do not ascend; {remedy}")
            if index and point[1] < points[index - 1][1]:
                raise EchoConfigError(
                    f"{path}.step[{index}]: a step of more rows takes less time; {remedy}"
                )
        for name in _LINES:
            # What a node costs can be less than what the step curve says of a row.
            low = -math.inf if name == "control" else 0.0
            meaning = f"[fixed ms, ms per item]; {remedy}"
            check_numbers(f"{path}.{name}", value[name], 2, meaning, low)
            check_number(f"{path}.{name}[0]", value[name][0], meaning, 0.0)
        for name, meaning in _CONTEXT.items():
            check_number(f"{path}.{name}", value.get(name, 0.0), meaning, 0.0)
        context_us = float(value.get("context_us", 0.0))
        return cls(
            step=tuple((rows, float(ms)) for rows, ms in points),
            **{name: Line(*map(float, value[name])) for name in _LINES},
            context_us=context_us,
            # A curve that does not say it comes from a kernel that is not known to share.
            node_context_us=float(value.get("node_context_us", context_us)),
        )


_LINES = ("roots", "layer", "catch_up", "control")
_CONTEXT = {
    "context_us": "microseconds per request and context token",
    "node_context_us": "microseconds per candidate and context token",
}


def _residual(x: Sequence[float], y: Sequence[float]) -> float:
    """Squared relative error of the best line a + b * x through the points, b >= 0."""
    weights = [1 / yi**2 for yi in y]
    total = sum(weights)
    mean_x = sum(w * xi for w, xi in zip(weights, x, strict=True)) / total
    mean_y = sum(w * yi for w, yi in zip(weights, y, strict=True)) / total
    points = list(zip(weights, x, y, strict=True))
    variance = sum(w * (xi - mean_x) ** 2 for w, xi, _ in points)
    covariance = sum(w * (xi - mean_x) * (yi - mean_y) for w, xi, yi in points)
    slope = max(0.0, covariance / variance) if variance else 0.0
    return sum(w * (yi - mean_y - slope * (xi - mean_x)) ** 2 for w, xi, yi in points)
