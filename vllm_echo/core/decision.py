# SPDX-License-Identifier: Apache-2.0
"""What is decided about a step before anything is drafted for it: plain data.

A policy makes one ``Decision`` a step, on the host, from history and load. Drafting and scheduling
are functions of tensors and of this, so policies differ in data only, and a runner on a device
needs nothing but the data.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch

from vllm_echo.core.cost import Line
from vllm_echo.core.shape import TreeShape


class Rule(IntEnum):
    """Who goes deeper, and in which order nodes are admitted. The numbers are the operators'."""

    GATES = 0
    """Gates on a request's confidence; depth first, then width (arXiv:2604.09603)."""
    PRICE = 1
    """What is worth more than it costs; the likeliest nodes of all first."""
    SHARES = 2
    """Everybody alike, to a fixed depth or while the beam holds; one node each in turn."""


@dataclass(frozen=True)
class Prices:
    """What candidates have to earn under ``Rule.PRICE``. D layers can be drafted."""

    num_requests: int
    """Tokens that the step emits in any case."""
    plain_ms: float
    """Milliseconds of the step before any candidate is verified."""
    added_ms: torch.Tensor
    """[K + 1] float64, milliseconds that 0 to K candidates add; K is the most there can be."""
    price: float
    """Acceptance probability from which a node pays."""
    ms_per_token: float
    """What a token is worth."""
    layer: Line
    """Milliseconds of a draft forward over n nodes."""
    curves: torch.Tensor
    """[D, 2, 2] float32, by depth from 1: (intercept, slope) of greedy and of sampled requests,
    which turn a child's log-probability into a score (``score.py``)."""
    best_child: torch.Tensor
    """[D, 2] float64, by depth from 1, greedy and sampled: mean acceptance probability of an
    accepted node's likeliest child there."""


@dataclass(frozen=True)
class Decision:
    """One step's."""

    rule: Rule
    shape: TreeShape
    budget: int
    """K_max: most nodes that are verified, all requests together. Under ``Rule.PRICE`` fewer are
    where fewer pay."""
    max_depth: int
    """Deepest layer that this step may draft."""
    thresholds: tuple[float | None, ...]
    """By depth, ``shape.max_depth`` of them, None where nothing is asked: probabilities that the
    best path to the layer drafted from there (``Rule.GATES``) or the nodes of it that would be
    expanded, together (``Rule.SHARES``), must exceed for the request to go on."""
    width: bool
    """Under ``Rule.GATES``: what depth leaves is spent on width."""
    transfer: bool
    """False: a request has its even share of ``budget``, and what it leaves is nobody's."""
    prices: Prices | None = None
    """Under ``Rule.PRICE``."""
