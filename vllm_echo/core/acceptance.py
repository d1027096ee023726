# SPDX-License-Identifier: Apache-2.0
"""How likely a candidate is to be accepted: what `vllm-echo calibrate` fits.

A draft probability q says how sure the head is, not how often it is right. For a child whose
parent is accepted,

    P(accepted | q, depth) = sigmoid(intercept[depth] + slope[depth] * logit(q))

with slope > 0, so siblings keep their order, and P <= 1, so a path's product never grows: trees
ordered by calibrated scores are trees in every prefix, like those ordered by log q. This
is Platt scaling by depth; `calibration/fit.py` fits it.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_echo.core.checks import check_keys, check_numbers, check_probability, check_type
from vllm_echo.errors import EchoConfigError

PRICES = (0.005, 0.01, 0.02, 0.03, *(step / 20 for step in range(1, 20)), 0.975)
"""Acceptance probabilities at which a head's supply is known."""

KINDS = ("greedy", "sampled")
"""Requests at temperature 0, and all others: the target then picks the head's likeliest token
less often."""


@dataclass(frozen=True)
class SupplyPoint:
    """What one request offers on average at a price and up to a depth: all candidates whose
    acceptance probability is above ``price``."""

    price: float
    nodes: float
    accepted: float
    """Sum of their acceptance probabilities: tokens gained."""
    layers: tuple[float, ...]
    """Chance that the request takes part in layer 2, 3, ... up to the last one that is drafted:
    what it costs to find them."""

    @property
    def depth(self) -> int:
        """Deepest layer that is drafted."""
        return 1 + len(self.layers)


@dataclass(frozen=True)
class AcceptanceModel:
    """The calibration of one kind of request."""

    curves: tuple[tuple[float, float], ...]
    """(intercept, slope) of depth 1, 2, ...; deeper nodes use the last pair."""
    best_child: tuple[float, ...]
    """Mean P(accepted) of an accepted node's likeliest child at depth 1, 2, ...; deeper ones as
    the last."""
    supply: tuple[SupplyPoint, ...]
    """By ascending price, then depth."""

    def curve_at(self, depth: int) -> tuple[float, float]:
        return self.curves[min(depth, len(self.curves)) - 1]

    def best_child_at(self, depth: int) -> float:
        return self.best_child[min(depth, len(self.best_child)) - 1]


@dataclass(frozen=True)
class Calibration:
    """Acceptance models by kind of request."""

    greedy: AcceptanceModel
    sampled: AcceptanceModel

    def models(self) -> tuple[AcceptanceModel, AcceptanceModel]:
        """In the order of ``KINDS``."""
        return self.greedy, self.sampled

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the inverse of ``from_dict``."""
        return {
            kind: {
                "curves": [list(pair) for pair in getattr(self, kind).curves],
                "best_child": list(getattr(self, kind).best_child),
                "supply": [
                    [p.price, p.nodes, p.accepted, list(p.layers)]
                    for p in getattr(self, kind).supply
                ],
            }
            for kind in KINDS
        }

    @classmethod
    def from_dict(cls, value: Any, path: str) -> "Calibration":
        """Read and check ``value``; ``path`` is its key, for messages."""
        check_type(path, value, Mapping, f"an object; {_REMEDY}")
        check_keys(path, value, KINDS, _REMEDY)
        return cls(**{kind: _read_model(value[kind], f"{path}.{kind}") for kind in KINDS})


_REMEDY = "write it with `vllm-echo calibrate`"


def _read_model(value: Any, path: str) -> AcceptanceModel:
    check_type(path, value, Mapping, f"an object; {_REMEDY}")
    check_keys(path, value, ("curves", "best_child", "supply"), _REMEDY)
    for name in ("curves", "best_child", "supply"):
        check_type(f"{path}.{name}", value[name], (list, tuple), f"a list; {_REMEDY}")
        if not value[name]:
            raise EchoConfigError(f"{path}.{name}: is empty; {_REMEDY}")
    for index, pair in enumerate(value["curves"]):
        check_numbers(f"{path}.curves[{index}]", pair, 2, "[intercept, slope]")
        if pair[1] <= 0:
            raise EchoConfigError(
                f"{path}.curves[{index}]: slope {pair[1]} would turn the head's order around; "
                f"give a number above 0, or {_REMEDY}"
            )
    for index, share in enumerate(value["best_child"]):
        check_probability(f"{path}.best_child[{index}]", share, "a number from 0 to 1")
    supply = tuple(
        _read_supply_point(row, f"{path}.supply[{index}]")
        for index, row in enumerate(value["supply"])
    )
    order = [(point.price, point.depth) for point in supply]
    if order != sorted(set(order)):
        raise EchoConfigError(f"{path}.supply: prices and depths do not ascend; {_REMEDY}")
    return AcceptanceModel(
        curves=tuple((float(a), float(b)) for a, b in value["curves"]),
        best_child=tuple(map(float, value["best_child"])),
        supply=supply,
    )


def _read_supply_point(row: Any, path: str) -> SupplyPoint:
    meaning = "[price, nodes, accepted, [chance of layer 2, 3, ...]]"
    check_type(path, row, (list, tuple), meaning)
    if len(row) != 4:
        raise EchoConfigError(f"{path}: has {len(row)} values; give {meaning}")
    check_numbers(path, row[:3], 3, meaning, 0.0)
    check_probability(path, row[0], f"a price from 0 to 1 in {meaning}")
    check_type(f"{path}[3]", row[3], (list, tuple), meaning)
    check_numbers(f"{path}[3]", row[3], len(row[3]), meaning)
    for chance in row[3]:
        check_probability(f"{path}[3]", chance, f"chances from 0 to 1 in {meaning}")
    price, nodes, accepted = map(float, row[:3])
    return SupplyPoint(price, nodes, accepted, tuple(map(float, row[3])))


def uncalibrated() -> Calibration:
    """Stands in until `vllm-echo calibrate` has run: the head is taken at its word, and a
    request's likeliest first candidate is anything between hopeless and certain."""
    child, depths = 0.6, 8
    supply = []
    for price, depth in itertools.product(PRICES, range(1, depths + 1)):
        reach = [min(1.0, price / child**d) for d in range(depth)]
        if reach[-1] == 1.0:
            continue
        supply.append(
            SupplyPoint(
                price=price,
                nodes=sum(1 - x for x in reach),
                accepted=sum(child**d * (1 - x * x) / 2 for d, x in enumerate(reach)),
                layers=tuple(1 - x for x in reach[1:]),
            )
        )
    model = AcceptanceModel(((0.0, 1.0),), (0.5, child), tuple(supply))
    return Calibration(model, model)
