# SPDX-License-Identifier: Apache-2.0
"""Policies: the same stages, other decisions.

``goodput``          nodes of the highest calibrated acceptance probability over all requests,
                     as many as pay by the cost curve; beyond the paper.
``echo``             sparse gates decide who goes deeper; budget moves between requests.
``dense``            echo with a gate at every depth.
``fixed-threshold``  echo with one threshold for all its gates.
``static``           an EAGLE-style tree: fixed depth and top-k, the best nodes by path score.
``ddd``              static, but drafting stops when the beam has lost its probability mass
                     (Dynamic Depth Decoding, arXiv:2409.00142).
``chain``            the most likely child only, to a fixed depth; what vLLM's ``eagle3`` drafts.

A policy says what the budget of a step is (``offer``) and what else is decided before drafting
(``decide``). What follows from that is ``draft``, ``gate`` and ``schedule``, the same for all.
"""

from dataclasses import replace

import torch

from vllm_echo.core.acceptance import uncalibrated
from vllm_echo.core.budget import NOTHING, ElasticBudget, Offer
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import StepLoad
from vllm_echo.core.decision import Decision, Prices, Rule
from vllm_echo.core.gate import SparseGates
from vllm_echo.core.score import score_curves
from vllm_echo.core.shape import TreeShape


class Policy:
    """What a configuration makes of a load."""

    def __init__(
        self,
        config: EchoConfig,
        shape: TreeShape,
        rule: Rule,
        budget: Offer | ElasticBudget,
        thresholds: tuple[float | None, ...] | None = None,
    ):
        self.shape = shape
        self.rule = rule
        self.thresholds = thresholds or (None,) * shape.max_depth
        self.config = config
        self.budget = budget
        if rule is Rule.PRICE:
            calibration = config.calibration or uncalibrated()
            self._curves = score_curves(calibration, shape.max_depth)
            self._best_child = torch.tensor(
                [
                    [model.best_child_at(depth) for model in calibration.models()]
                    for depth in range(1, shape.max_depth + 1)
                ],
                dtype=torch.float64,
            )

    def offer(self, load: StepLoad, num_sampled: int = 0) -> Offer:
        """The budget of a step; ``num_sampled`` of its requests are not greedy.

        Under ``Rule.PRICE`` all that the requests may have, once anything pays: scheduling knows
        the candidates themselves, and what is known beforehand is only their average.
        """
        if isinstance(self.budget, Offer):
            return self.budget
        offer = self.budget.offer(load, num_sampled)
        if self.rule is not Rule.PRICE or offer.num_nodes == 0:
            return offer
        most, k_max = self._most_nodes(load), self.config.k_max
        return replace(offer, num_nodes=most if isinstance(k_max, str) else min(most, k_max))

    def decide(self, load: StepLoad, offer: Offer) -> Decision:
        """All that is decided about a step of ``load`` before it drafts; ``offer`` is its budget,
        or what an engine leaves of it."""
        return Decision(
            rule=self.rule,
            shape=self.shape,
            budget=offer.num_nodes,
            max_depth=self._max_depth(offer),
            thresholds=self.thresholds,
            width=self.config.width,
            transfer=self.config.transfer,
            prices=self._prices(load, offer) if self.rule is Rule.PRICE else None,
        )

    def _max_depth(self, offer: Offer) -> int:
        """Gates know nothing of the cost of a forward, so an elastic offer sets their end."""
        if offer.num_nodes == 0:
            return 1
        if self.rule is Rule.GATES:
            return max(1, min(self.shape.max_depth, offer.depth))
        return self.shape.max_depth

    def _prices(self, load: StepLoad, offer: Offer) -> Prices:
        assert isinstance(self.budget, ElasticBudget), "an idle policy drafts nothing"
        return Prices(
            num_requests=load.num_requests,
            plain_ms=offer.plain_ms,
            added_ms=self.budget.added_ms(load, min(offer.num_nodes, self._most_nodes(load))),
            price=offer.price,
            ms_per_token=offer.ms_per_token,
            layer=self.budget.curve.layer,
            curves=self._curves,
            best_child=self._best_child,
        )

    def _most_nodes(self, load: StepLoad) -> int:
        return load.num_requests * self.config.num_speculative_tokens


class RecordingPolicy(Policy):
    """Drafts in full for everybody and verifies nothing: every output position becomes a root
    (``trace.py``)."""

    def decide(self, load: StepLoad, offer: Offer) -> Decision:
        return replace(super().decide(load, offer), budget=0, transfer=True)


def make_recording_policy(config: EchoConfig) -> RecordingPolicy:
    """Trees of ``max_depth`` layers and ``top_k``, whatever ``config.policy`` says."""
    shape = TreeShape.within(config.max_depth, config.top_k, config.num_speculative_tokens)
    return RecordingPolicy(config, shape, Rule.SHARES, Offer(MANY_NODES))


def make_policy(config: EchoConfig) -> Policy:
    """The policy that ``config.policy`` names (validated by ``EchoConfig``). It offers nothing
    while the cost curve by which it decides is still to be measured."""
    fixed = config.policy in ("static", "chain")
    max_depth = config.target_depth if fixed else config.max_depth
    top_k = 1 if config.policy == "chain" else config.top_k
    shape = TreeShape.within(max_depth, top_k, config.num_speculative_tokens)
    budget = _budget(config, shape)
    if config.policy == "goodput":
        return Policy(config, shape, Rule.PRICE, budget)
    if config.policy == "ddd":
        return Policy(config, shape, Rule.SHARES, budget, _beam_thresholds(config))
    if fixed:
        return Policy(config, shape, Rule.SHARES, budget)
    return Policy(config, shape, Rule.GATES, budget, _gates(config).by_depth(max_depth))


def _budget(config: EchoConfig, shape: TreeShape) -> Offer | ElasticBudget:
    if not config.needs_profile:
        assert isinstance(config.k_max, int)
        return Offer(config.k_max)
    return _elastic_budget(config, shape) or NOTHING


def _elastic_budget(config: EchoConfig, shape: TreeShape) -> ElasticBudget | None:
    if config.profile is None or not config.needs_profile:
        return None
    most = config.k_max if isinstance(config.k_max, int) else MANY_NODES
    calibration = config.calibration or uncalibrated()
    return ElasticBudget(config.profile, calibration, shape, config.num_speculative_tokens, most)


MANY_NODES = 1 << 20
"""No cap but the requests' own."""


def _gates(config: EchoConfig) -> SparseGates:
    gates = SparseGates.from_config(config)
    if config.policy == "dense":
        return gates.at_every_depth(config.max_depth)
    if config.policy == "fixed-threshold":
        return gates.with_threshold(config.threshold)
    return gates


def _beam_thresholds(config: EchoConfig) -> tuple[float | None, ...]:
    """From ``target_depth`` on, but for the last layer, which nobody expands."""
    asked = range(config.target_depth - 1, config.max_depth - 1)
    return tuple(config.threshold if d in asked else None for d in range(config.max_depth))
