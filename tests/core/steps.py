# SPDX-License-Identifier: Apache-2.0
"""Random steps: a draft head that reads from a table, and what the pipeline decides with it."""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tests.core.kit import CPU, bits_of
from tests.core.machines import random_calibration, random_curve
from vllm_echo.core.budget import Offer
from vllm_echo.core.config import MAX_NODES_PER_STEP, POLICIES, EchoConfig, Gate
from vllm_echo.core.cost import StepLoad
from vllm_echo.core.decision import Decision, Rule
from vllm_echo.core.draft import DraftBatch, Frontier, grow_trees
from vllm_echo.core.gate import Growth
from vllm_echo.core.pipeline import EchoPipeline
from vllm_echo.core.policies import Policy, make_policy
from vllm_echo.core.score import child_scores
from vllm_echo.core.tree import CandidateTrees, DraftTrees
from vllm_echo.reference.draft import Children, Limits, path_to
from vllm_echo.reference.schedule import Node, to_float32

VOCAB = 30
MAX_CHILDREN = 8
SMALL = [0, 1, 1, 2, 3, 5, 9]
"""Requests of a step, where nothing depends on their number."""
UNLIMITED = MAX_NODES_PER_STEP
GATED = ("echo", "dense", "fixed-threshold")
BY_DRAFT = tuple(policy for policy in POLICIES if policy != "goodput")
"""Policies whose decisions do not depend on what a step costs."""

# Path scores are sums of these. Eighths add up exactly in float32, so ties are real ties; -120
# underflows to confidence 0; a child as likely as its parent (0.0) must still come after it.
LOG_PROBS = {
    "plain": [-k / 8 for k in range(1, 33)],
    "tied": [0.0, -0.5, -1.0],
    "underflow": [0.0, -0.25, -1.0, -120.0],
    "forbidden": [-0.125, -0.5, -float("inf"), -float("inf")],
}
KINDS = (*LOG_PROBS, "distinct")
"""Of tables; "distinct" ones hold random numbers, so that hardly two are equal."""


def random_children(seed: int, kind: str) -> Children:
    """Tables from ``seed`` alone: MAX_CHILDREN distinct tokens a path, best first.

    The best child is always possible, as a softmax makes it.
    """

    @functools.cache
    def children(request: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        source = random.Random(f"{seed}/{request}/{path}")  # text seeds do not depend on hash()
        tokens = source.sample(range(VOCAB), MAX_CHILDREN)
        if kind == "distinct":
            log_probs = [to_float32(source.uniform(-4, 0)) for _ in tokens]
        else:
            possible = [value for value in LOG_PROBS[kind] if value > -float("inf")]
            others = source.choices(LOG_PROBS[kind], k=MAX_CHILDREN - 1)
            log_probs = [source.choice(possible), *others]
        return list(zip(tokens, sorted(log_probs, reverse=True), strict=True))

    return children


def scored_children(step: "Step") -> Children:
    """The step's tables as its policy scores them, for the reference."""
    decision, children = step.policy().decide(step.load, step.offer()), step.children()

    @functools.cache
    def scored(request: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        found = children(request, path)
        log_probs = torch.tensor([[[log_prob for _, log_prob in found]]])
        of_one = (torch.tensor([0]), torch.tensor([step.limits[request].sampled]))
        scores = child_scores(decision, len(path) + 1, log_probs, *of_one).flatten().tolist()
        return [(token, score) for (token, _), score in zip(found, scores, strict=True)]

    return scored


@dataclass
class _ForwardRow:
    request: int
    path: tuple[int, ...]
    slots: frozenset[int]


class TableHead:
    """``vllm_echo.core.draft.DraftHead`` over a table. It follows each frontier back through
    ``parent_rows``, as a head that feeds hidden states back does, and checks positions, draft
    slots and masks on the way; ``forwards`` lists the requests of every forward."""

    def __init__(self, children: Children, num_requests: int, policy: Policy):
        self._children = children
        self._num_slots = policy.shape.num_draft_slots
        self._slots_taken = 0
        self._rows = [_ForwardRow(r, (), frozenset()) for r in range(num_requests)]
        self.forwards: list[list[int]] = []

    def expand_roots(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._look_up((len(self._rows), width))

    def expand(self, frontier: Frontier, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        requests = frontier.requests.tolist()
        assert requests == sorted(set(requests)), "requests must ascend"
        rows: list[_ForwardRow] = []
        for a, request in enumerate(requests):
            for f, parent_row in enumerate(frontier.parent_rows[a].tolist()):
                parent = self._rows[parent_row]
                token, slot = int(frontier.tokens[a, f]), frontier.first_slot + f
                row = _ForwardRow(request, (*parent.path, token), parent.slots | {slot})
                assert parent.request == request, "a node continues another request's state"
                assert token in dict(self._children(request, parent.path)), "not its parent's child"
                assert len(row.path) == frontier.depth, "a node has a wrong draft position"
                assert bits_of(frontier.ancestors[a, f]) == row.slots, "a wrong draft mask"
                rows.append(row)
        assert frontier.first_slot == self._slots_taken, "draft KV would be overwritten"
        self._slots_taken += frontier.tokens.shape[1]
        assert self._slots_taken <= self._num_slots, "more draft KV than the policy announced"
        self._rows = rows
        self.forwards.append(requests)
        return self._look_up((*frontier.tokens.shape, width))

    def _look_up(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        found = [self._children(row.request, row.path)[: shape[-1]] for row in self._rows]
        tokens = [token for children in found for token, _ in children]
        log_probs = [log_prob for children in found for _, log_prob in children]
        return (
            torch.tensor(tokens, dtype=torch.int32).view(shape),
            torch.tensor(log_probs, dtype=torch.float32).view(shape),
        )


@dataclass(frozen=True)
class Step:
    """Everything that a step's decision depends on."""

    config: EchoConfig
    limits: tuple[Limits, ...]
    seed: int
    kind: str
    budget: int | str
    """K_max: a number or "auto"."""

    def children(self) -> Children:
        return random_children(self.seed, self.kind)

    @property
    def load(self) -> StepLoad:
        return StepLoad(len(self.limits), num_context_tokens=200 * len(self.limits))

    def policy(self) -> Policy:
        return make_policy(replace(self.config, k_max=self.budget))

    def offer(self) -> Offer:
        """At most ``budget``, and for goodput at most what its curve says."""
        return self.policy().offer(self.load, sum(limit.sampled for limit in self.limits))


@dataclass
class Outcome:
    decision: Decision
    trees: DraftTrees
    candidates: CandidateTrees
    growth: Growth
    forwards: list[list[int]]

    @property
    def counts(self) -> list[int]:
        return self.trees.num_nodes.tolist()

    @property
    def layers(self) -> list[int]:
        return self.growth.num_layers.tolist()

    @property
    def truncated(self) -> list[bool]:
        return self.growth.truncated.tolist()

    @property
    def caps(self) -> list[int]:
        return self.growth.limits.caps.tolist()

    @property
    def possible(self) -> list[int]:
        """Candidates per request."""
        return self.candidates.scores.isfinite().sum(dim=1).tolist()


def decide(step: Step, children: Children | None = None, offer: Offer | None = None) -> Outcome:
    """``EchoPipeline.propose_trees`` and the forwards that it took; with a budget of 0 too."""
    num_requests = len(step.limits)
    pipeline = EchoPipeline(replace(step.config, k_max=step.budget), num_requests, CPU)
    head = TableHead(children or step.children(), num_requests, pipeline.policy)
    proposal = pipeline.propose_trees(
        head,
        draft_batch(step.limits),
        torch.arange(num_requests),
        step.offer() if offer is None else offer,
        step.load,
    )
    made = proposal.decision, proposal.trees, proposal.candidates, proposal.growth
    return Outcome(*made, head.forwards)


def drafted_in_full(step: Step) -> CandidateTrees:
    """All layers of everybody, whatever gates, price, beam and budget say."""
    decision = step.policy().decide(step.load, step.offer())
    asks_nothing = (None,) * decision.shape.max_depth
    in_full = replace(decision, rule=Rule.SHARES, thresholds=asks_nothing, transfer=True)
    head = TableHead(step.children(), len(step.limits), step.policy())
    return grow_trees(head, draft_batch(step.limits), in_full)[0]


def draft_batch(limits: Sequence[Limits]) -> DraftBatch:
    return DraftBatch(
        max_nodes=torch.tensor([limit.max_nodes for limit in limits], dtype=torch.int32),
        can_expand=torch.tensor([limit.can_expand for limit in limits], dtype=torch.bool),
        chain_only=torch.tensor([limit.chain_only for limit in limits], dtype=torch.bool),
        max_depths=torch.tensor([limit.max_depth for limit in limits], dtype=torch.int32),
        sampled=torch.tensor([limit.sampled for limit in limits], dtype=torch.bool),
    )


def random_gates(source: random.Random, max_depth: int) -> tuple[Gate, ...]:
    """Anywhere; or two far apart, such that dense ones in between decide what these leave open."""
    if source.random() < 0.3:
        return (Gate(0, 0.02), Gate(max_depth, source.choice([0.6, 1.0])))
    depths = source.sample(range(max_depth + 1), source.randint(0, max_depth + 1))
    return tuple(Gate(depth, source.choice([0.0, 0.05, 0.2, 0.6, 1.0])) for depth in depths)


def random_step(source: random.Random, sizes: Sequence[int] = SMALL, **fixed: object) -> Step:
    """A step of any shape with one of ``sizes`` requests; ``fixed`` overrides its fields or those
    of its config. ``policy`` may also be several, to choose from."""
    num_nodes = source.randint(1, 12)
    max_depth = source.randint(1, min(num_nodes, 6))
    gates = random_gates(source, max_depth)
    policy = fixed.pop("policy", POLICIES)
    options = {
        "num_speculative_tokens": num_nodes,
        "policy": policy if isinstance(policy, str) else source.choice(policy),
        "max_depth": max_depth,
        "target_depth": source.randint(1, max_depth),
        "top_k": source.randint(1, 4),
        "gates": gates,
        "threshold": source.choice([0.0, 0.05, 0.3, 0.7, 1.0]),
        "transfer": source.random() < 0.8,
        "width": source.random() < 0.8,
    }
    options["profile"] = random_curve(source)
    options["calibration"] = random_calibration(source)
    options.update((key, value) for key, value in fixed.items() if key in options)
    config = EchoConfig(**options)
    limits = tuple(
        Limits(
            source.randint(0, config.num_speculative_tokens),
            can_expand=source.random() < 0.8,
            chain_only=source.random() < 0.2,
            max_depth=source.choice([1, 2, 4, 255, 255, 255]),
            sampled=source.random() < 0.4,
        )
        for _ in range(source.choice(sizes))
    )
    most = sum(limit.max_nodes for limit in limits)
    values = {
        "limits": limits,
        "seed": source.randrange(2**32),
        "kind": source.choice(KINDS),
        "budget": source.choice(
            [0, 1, most // 2, source.randint(0, most), most, UNLIMITED, "auto", "auto"]
        ),
    }
    values.update((key, value) for key, value in fixed.items() if key in values)
    return Step(config, **values)


def path_scores(
    children: Children, request: int, tree: Sequence[tuple[int, int, int]]
) -> list[float]:
    """The nodes' path scores, looked up afresh."""
    nodes = [Node(*row, 0.0) for row in tree]
    scores = []
    for index in range(len(nodes)):
        score, path = 0.0, path_to(nodes, index)
        for depth, token in enumerate(path):
            score = to_float32(score + dict(children(request, path[:depth]))[token])
        scores.append(score)
    return scores
