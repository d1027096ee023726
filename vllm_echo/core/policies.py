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

A policy answers four questions: what is the budget (``offer``), what is a node's score
(``child_scores``), who goes deeper (``go_deeper``), who gets how many nodes (``spend``).
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from vllm_echo import ops
from vllm_echo.core.acceptance import uncalibrated
from vllm_echo.core.budget import NOTHING, ElasticBudget, Offer
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import StepLoad
from vllm_echo.core.gate import SparseGates
from vllm_echo.core.schedule import best_paying, share_evenly
from vllm_echo.core.score import CalibratedScores
from vllm_echo.core.tree import BITS_PER_WORD, CandidateTrees, num_words


@dataclass(frozen=True)
class TreeShape:
    """How far and how wide trees can be drafted."""

    max_depth: int
    """Deepest layer that is ever drafted."""
    top_k: int
    """Children drafted per expanded node."""
    frontier_widths: tuple[int, ...]
    """Nodes of depth 1, 2, ... that are expanded (``max_depth - 1`` entries)."""

    def first_slot(self, depth: int) -> int:
        """Draft slots taken by expanded nodes above ``depth``."""
        return sum(self.frontier_widths[: depth - 1])

    @property
    def num_draft_slots(self) -> int:
        """Draft slots that a request needs beyond its root."""
        return sum(self.frontier_widths)

    @property
    def num_candidates(self) -> int:
        """C, columns of a table of candidates."""
        return self.layer_columns(self.max_depth)[1]

    def layer_columns(self, depth: int) -> tuple[int, int]:
        """First and end column of the candidates at ``depth``."""
        first = self.top_k * (1 + self.first_slot(depth - 1)) if depth > 1 else 0
        parents = self.frontier_widths[depth - 2] if depth > 1 else 1
        return first, first + self.top_k * parents

    @cached_property
    def column_depths(self) -> torch.Tensor:
        """[C] int32."""
        sizes = [self.layer_columns(d) for d in range(1, self.max_depth + 1)]
        return torch.repeat_interleave(
            torch.arange(1, self.max_depth + 1, dtype=torch.int32),
            torch.tensor([last - first for first, last in sizes]),
        )

    def own_bits(self, depth: int) -> torch.Tensor:
        """[F, W] int64: the bit of each expanded node's own draft slot at ``depth``."""
        return self._own_bits[depth - 1]

    @cached_property
    def _own_bits(self) -> list[torch.Tensor]:
        words = num_words(self.num_draft_slots)
        bits = []
        for depth, width in enumerate(self.frontier_widths, start=1):
            slots = self.first_slot(depth) + torch.arange(width)
            rows = torch.zeros(width, words, dtype=torch.int64)
            rows[torch.arange(width), slots // BITS_PER_WORD] = torch.ones_like(slots) << (
                slots % BITS_PER_WORD
            )
            bits.append(rows)
        return bits


@dataclass
class Growth:
    """What a step's drafting has decided so far. R requests."""

    offer: Offer
    load: StepLoad
    caps: torch.Tensor
    """[R] int32, most nodes of each request."""
    sampled: torch.Tensor
    """[R] bool, temperature above 0."""
    deepest: torch.Tensor
    """[R] int32, last layer that each request can have."""
    active: torch.Tensor
    """[R] bool, still going deeper: drafted for in the first layer, expanded for the next ones."""
    num_layers: torch.Tensor
    """[R] int32, layers that phase 1 has paid for, one node each."""
    truncated: torch.Tensor
    """[R] bool, cut by a gate (and not by the budget or by reaching its last depth)."""
    budget: int
    """Nodes left."""
    passed: dict[int, int] = field(default_factory=dict)
    """Requests that passed the gate at a depth."""
    cut: dict[int, int] = field(default_factory=dict)
    """Requests that were truncated by the gate at a depth."""
    num_forwards: int = 0
    """Draft forwards, one a layer below the first."""
    num_expanded: int = 0
    """Nodes that they expanded."""

    @property
    def exhausted(self) -> bool:
        return self.budget <= 0


class Policy:
    """The fixed shapes: no gates, drafted in full, an equal share for everybody."""

    def __init__(self, config: EchoConfig, shape: TreeShape, elastic: ElasticBudget | None):
        self.config = config
        self.shape = shape
        self._elastic = elastic

    def offer(self, load: StepLoad, num_sampled: int = 0) -> Offer:
        """The budget of a step; ``num_sampled`` of its requests are not greedy."""
        if self._elastic is None:
            assert isinstance(self.config.k_max, int)
            return Offer(self.config.k_max)
        return self._elastic.offer(load, num_sampled)

    def caps(self, max_nodes: torch.Tensor, offer: Offer) -> torch.Tensor:
        """[R] int32, most nodes of each request, within the engine's ``max_nodes`` [R]."""
        if self.config.transfer:
            return max_nodes
        drafted = max_nodes > 0
        place = drafted.cumsum(0) - 1
        share, rest = divmod(offer.num_nodes, max(1, int(drafted.sum())))
        even = share + (place < rest).long()
        return torch.minimum(max_nodes.long(), even).to(max_nodes.dtype)

    def depth_limit(self, offer: Offer) -> int:
        """Deepest layer of this step."""
        return self.shape.max_depth

    def child_scores(
        self,
        depth: int,
        log_probs: torch.Tensor,
        requests: torch.Tensor,
        sampled: torch.Tensor,
    ) -> torch.Tensor:
        """What a child at ``depth`` adds to its path's score: log q. ``log_probs`` [A, F, K] of
        the ``requests`` [A] int64; ``sampled`` [R] bool."""
        return log_probs

    def go_deeper(
        self, growth: Growth, depth: int, scores: torch.Tensor, best: torch.Tensor
    ) -> torch.Tensor:
        """[R] bool, among ``growth.active``: whose nodes at ``depth`` + 1, just drafted, are
        expanded; path ``scores`` [R, M], the ``best`` of each [R]. May spend ``growth.budget``."""
        return growth.active & (best > -torch.inf) & (depth + 1 < growth.deepest)

    def spend(self, trees: CandidateTrees, growth: Growth) -> torch.Tensor:
        """[R] int32, nodes per request, never more than ``growth.offer`` in all."""
        drafted = trees.scores.isfinite().sum(dim=1).to(growth.caps.dtype)
        return share_evenly(torch.minimum(drafted, growth.caps), growth.budget)


class BeamPolicy(Policy):
    """ddd: from ``target_depth`` on a request goes deeper only while its beam, the nodes that
    would be expanded, holds more than ``threshold`` of the probability."""

    def go_deeper(
        self, growth: Growth, depth: int, scores: torch.Tensor, best: torch.Tensor
    ) -> torch.Tensor:
        deeper = super().go_deeper(growth, depth, scores, best)
        if not self.config.target_depth <= depth + 1 < self.shape.max_depth:
            return deeper
        width = min(self.shape.frontier_widths[depth], scores.shape[1])
        mass = scores.topk(width, dim=1).values.exp().sum(dim=1)
        return deeper & (mass > self.config.threshold)


class ElasticPolicy(Policy):
    """echo and its relatives: gates, depth first, then width."""

    def __init__(
        self,
        config: EchoConfig,
        shape: TreeShape,
        elastic: ElasticBudget | None,
        gates: SparseGates,
    ):
        super().__init__(config, shape, elastic)
        self.gates = gates

    def depth_limit(self, offer: Offer) -> int:
        """With an elastic K_max also where a layer's forward is no longer worth it."""
        return min(self.shape.max_depth, offer.depth)

    def go_deeper(
        self, growth: Growth, depth: int, scores: torch.Tensor, best: torch.Tensor
    ) -> torch.Tensor:
        threshold = self.gates.threshold(depth)
        deeper, counts = ops.grant_layer(
            best,
            growth.active,
            growth.caps,
            growth.deepest,
            growth.num_layers,
            growth.truncated,
            depth,
            threshold,
            growth.budget,
        )
        passed, cut, granted = counts.tolist()
        if threshold is not None:
            growth.passed[depth], growth.cut[depth] = passed, cut
        growth.budget -= granted
        return deeper

    def spend(self, trees: CandidateTrees, growth: Growth) -> torch.Tensor:
        if not self.config.width:
            return growth.num_layers
        granted = (trees.truncated, growth.num_layers, growth.caps)
        return ops.grant_width(trees.scores, *granted, growth.budget)


class GoodputPolicy(Policy):
    """Scores are calibrated acceptance probabilities; a layer is drafted when what it is
    expected to add is worth its forward, and a node is verified when it pays."""

    def __init__(self, config: EchoConfig, shape: TreeShape, elastic: ElasticBudget):
        super().__init__(config, shape, elastic)
        self._elastic: ElasticBudget = elastic
        calibration = config.calibration or uncalibrated()
        self._scores = CalibratedScores(calibration, shape.max_depth)
        self._best_child = [
            torch.tensor(
                [model.best_child_at(depth) for model in calibration.models()], dtype=torch.float64
            )
            for depth in range(1, shape.max_depth + 1)
        ]

    def offer(self, load: StepLoad, num_sampled: int = 0) -> Offer:
        """All that the requests may have, once anything pays: ``spend`` knows the candidates
        themselves, and what is known beforehand is only their average."""
        offer = super().offer(load, num_sampled)
        if offer.num_nodes == 0:
            return offer
        most = load.num_requests * self.config.num_speculative_tokens
        k_max = self.config.k_max
        return replace(offer, num_nodes=most if isinstance(k_max, str) else min(most, k_max))

    def child_scores(
        self,
        depth: int,
        log_probs: torch.Tensor,
        requests: torch.Tensor,
        sampled: torch.Tensor,
    ) -> torch.Tensor:
        """log P(accepted | parent accepted)."""
        return self._scores(depth, log_probs, requests, sampled)

    def go_deeper(
        self, growth: Growth, depth: int, scores: torch.Tensor, best: torch.Tensor
    ) -> torch.Tensor:
        if depth + 1 >= self.shape.max_depth:
            return torch.zeros_like(growth.active)
        layer, offer = self._elastic.curve.layer, growth.offer
        return ops.expect_gain(
            best,
            growth.active,
            growth.deepest,
            growth.sampled,
            self._best_child[depth + 1],
            depth,
            offer.price,
            offer.ms_per_token,
            layer.each * self.shape.frontier_widths[depth],
            layer.fixed,
        )

    def spend(self, trees: CandidateTrees, growth: Growth) -> torch.Tensor:
        most = min(growth.budget, int(growth.caps.sum()))
        added = self._elastic.added_ms(growth.load, most)
        return best_paying(
            trees, growth.caps, growth.load.num_requests, growth.offer.plain_ms, added
        )


class IdlePolicy(Policy):
    """Nothing is drafted: the cost curve that decides is still to be measured."""

    def offer(self, load: StepLoad, num_sampled: int = 0) -> Offer:
        return NOTHING


class RecordingPolicy(Policy):
    """Drafts in full for everybody and verifies nothing: every output position becomes a root
    (``trace.py``)."""

    def offer(self, load: StepLoad, num_sampled: int = 0) -> Offer:
        return Offer(MANY_NODES)

    def caps(self, max_nodes: torch.Tensor, offer: Offer) -> torch.Tensor:
        return max_nodes

    def spend(self, trees: CandidateTrees, growth: Growth) -> torch.Tensor:
        return torch.zeros_like(growth.caps)


def make_recording_policy(config: EchoConfig) -> RecordingPolicy:
    """Trees of ``max_depth`` layers and ``top_k``, whatever ``config.policy`` says."""
    return RecordingPolicy(config, _shape(config, config.max_depth, config.top_k), None)


def make_policy(config: EchoConfig) -> Policy:
    """The policy that ``config.policy`` names (validated by ``EchoConfig``)."""
    fixed = config.policy in ("static", "chain")
    max_depth = config.target_depth if fixed else config.max_depth
    top_k = 1 if config.policy == "chain" else config.top_k
    shape = _shape(config, max_depth, top_k)
    if config.needs_profile and config.profile is None:
        return IdlePolicy(config, shape, None)
    elastic = _elastic_budget(config)
    if config.policy == "goodput":
        assert elastic is not None  # needs_profile
        return GoodputPolicy(config, shape, elastic)
    if config.policy == "ddd":
        return BeamPolicy(config, shape, elastic)
    if fixed:
        return Policy(config, shape, elastic)
    return ElasticPolicy(config, shape, elastic, _gates(config))


def _shape(config: EchoConfig, max_depth: int, top_k: int) -> TreeShape:
    widths = _frontier_widths(max_depth, top_k, config.num_speculative_tokens)
    return TreeShape(max_depth, top_k, widths)


def _elastic_budget(config: EchoConfig) -> ElasticBudget | None:
    if config.profile is None or not config.needs_profile:
        return None
    most = config.k_max if isinstance(config.k_max, int) else MANY_NODES
    return ElasticBudget(config.profile, config.calibration or uncalibrated(), most)


MANY_NODES = 1 << 20
"""No cap but the requests' own."""


def _gates(config: EchoConfig) -> SparseGates:
    gates = SparseGates.from_config(config)
    if config.policy == "dense":
        return gates.at_every_depth(config.max_depth)
    if config.policy == "fixed-threshold":
        return gates.with_threshold(config.threshold)
    return gates


def _frontier_widths(max_depth: int, top_k: int, max_nodes: int) -> tuple[int, ...]:
    """top_k nodes a layer while draft slots last, and one for every later layer.

    A request has ``max_nodes`` draft slots (what the engine reserves ahead), and an
    expanded node that is not among its best ``max_nodes`` is wasted, so at most
    ``max_nodes - 1`` are expanded in all. Needs ``max_depth <= max_nodes``.
    """
    left = max_nodes - 1
    widths = []
    for later_layers in reversed(range(max_depth - 1)):
        widths.append(min(top_k, left - later_layers))
        left -= widths[-1]
    return tuple(widths)
