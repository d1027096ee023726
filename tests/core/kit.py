# SPDX-License-Identifier: Apache-2.0
"""A draft head that reads from a table, random steps, and the two versions of a step's decision."""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_echo.config import EchoConfig, Gate
from vllm_echo.draft import DraftBatch, Frontier, grow_trees
from vllm_echo.pack import pack_trees
from vllm_echo.pipeline import EchoPipeline
from vllm_echo.policies import Policy, make_policy
from vllm_echo.reference.draft import Children, Limits, path_to, to_float32
from vllm_echo.reference.schedule import ROOT, Node
from vllm_echo.schedule import take_best
from vllm_echo.tree import (
    BITS_PER_WORD,
    AcceptedPaths,
    CandidateTrees,
    DraftTrees,
    SuperTree,
)

CPU = torch.device("cpu")
VOCAB = 30
MAX_CHILDREN = 8
# Around every word of the ancestor bits, and the most that one request may have.
SIZES = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255]

# Path scores are sums of these. Eighths add up exactly in float32, so ties are real ties; -120
# underflows to confidence 0; a child as likely as its parent (0.0) must still come after it.
LOG_PROBS = {
    "plain": [-k / 8 for k in range(1, 33)],
    "tied": [0.0, -0.5, -1.0],
    "underflow": [0.0, -0.25, -1.0, -120.0],
    "forbidden": [-0.125, -0.5, -float("inf"), -float("inf")],
}


def random_children(seed: int, kind: str) -> Children:
    """Tables from ``seed`` alone: MAX_CHILDREN distinct tokens a path, best first.

    The best child is always possible, as a softmax makes it.
    """

    @functools.cache
    def children(request: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        source = random.Random(f"{seed}/{request}/{path}")  # text seeds do not depend on hash()
        tokens = source.sample(range(VOCAB), MAX_CHILDREN)
        possible = [value for value in LOG_PROBS[kind] if value > -float("inf")]
        log_probs = [source.choice(possible)] + source.choices(LOG_PROBS[kind], k=MAX_CHILDREN - 1)
        return list(zip(tokens, sorted(log_probs, reverse=True), strict=True))

    return children


@dataclass
class _ForwardRow:
    request: int
    path: tuple[int, ...]
    slots: frozenset[int]


class TableHead:
    """``vllm_echo.draft.DraftHead`` over a table. It follows each frontier back through
    ``parent_rows``, as a head that feeds hidden states back does, and checks positions, draft
    slots and masks on the way; ``forwards`` lists the requests of every forward."""

    def __init__(self, children: Children, num_requests: int, policy: Policy):
        self._children = children
        self._num_slots = policy.num_draft_slots
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


def bits_of(words: torch.Tensor) -> frozenset[int]:
    """The set bits of int64 ``words`` [W]."""
    return frozenset(
        BITS_PER_WORD * word + bit
        for word, value in enumerate(words.tolist())
        for bit in range(BITS_PER_WORD)
        if value >> bit & 1
    )


@dataclass(frozen=True)
class Step:
    """Everything that a step's decision depends on."""

    config: EchoConfig
    limits: tuple[Limits, ...]
    seed: int
    kind: str
    budget: int

    def children(self) -> Children:
        return random_children(self.seed, self.kind)


@dataclass
class Decision:
    trees: DraftTrees
    candidates: CandidateTrees
    budget_left: int
    """After phase 1."""
    forwards: list[list[int]]


def decide(step: Step, children: Children | None = None) -> Decision:
    """``EchoPipeline.propose_trees`` with its intermediate results, and with a budget of 0 too."""
    policy = make_policy(step.config)
    head = TableHead(children or step.children(), len(step.limits), policy)
    batch = draft_batch(step.limits)
    candidates, left = grow_trees(head, batch, policy, step.budget)
    counts = EchoPipeline(step.config, 1, CPU)._spend(candidates, batch.max_nodes, left)
    trees = take_best(candidates, counts, step.config.num_speculative_tokens)
    return Decision(trees, candidates, left, head.forwards)


def draft_batch(limits: Sequence[Limits]) -> DraftBatch:
    return DraftBatch(
        torch.tensor([limit.max_nodes for limit in limits], dtype=torch.int32),
        torch.tensor([limit.can_expand for limit in limits], dtype=torch.bool),
        torch.tensor([limit.chain_only for limit in limits], dtype=torch.bool),
    )


def random_step(source: random.Random, **fixed: object) -> Step:
    """A step of any shape; ``fixed`` overrides its fields or those of its config."""
    num_nodes = source.randint(1, 12)
    max_depth = source.randint(1, min(num_nodes, 6))
    depths = source.sample(range(max_depth + 1), source.randint(0, max_depth + 1))
    options = {
        "num_speculative_tokens": num_nodes,
        "policy": source.choice(["echo", "echo", "echo", "static", "chain"]),
        "max_depth": max_depth,
        "target_depth": source.randint(1, max_depth),
        "top_k": source.randint(1, 4),
        "gates": tuple(Gate(depth, source.choice([0.0, 0.05, 0.2, 0.6, 1.0])) for depth in depths),
    }
    options.update((key, value) for key, value in fixed.items() if key in options)
    config = EchoConfig(**options)
    limits = tuple(
        Limits(
            source.randint(0, config.num_speculative_tokens),
            can_expand=source.random() < 0.8,
            chain_only=source.random() < 0.2,
        )
        for _ in range(source.choice([0, 1, 1, 2, 3, 5, 9]))
    )
    most = sum(limit.max_nodes for limit in limits)
    values = {
        "limits": limits,
        "seed": source.randrange(2**32),
        "kind": source.choice(sorted(LOG_PROBS)),
        "budget": source.choice([0, 1, most // 2, source.randint(0, most), most, 2**31 - 1]),
    }
    values.update((key, value) for key, value in fixed.items() if key in values)
    return Step(config, **values)


def as_lists(trees: DraftTrees) -> list[list[tuple[int, int, int]]]:
    """Per request its (token, parent, depth) rows, without what lies beyond ``num_nodes``."""
    columns = torch.stack([trees.tokens, trees.parents, trees.depths], dim=2).tolist()
    counts = trees.num_nodes.tolist()
    return [list(map(tuple, row[:count])) for row, count in zip(columns, counts, strict=True)]


def nodes_as_lists(trees: Sequence[Sequence[Node]]) -> list[list[tuple[int, int, int]]]:
    return [[node[:3] for node in tree] for tree in trees]


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


def draft_trees(trees: Sequence[Sequence[Node]], width: int | None = None) -> DraftTrees:
    """Tensors of the trees, padded with rubbish to ``width``."""
    width = max([1, *map(len, trees)]) if width is None else width

    def padded(values: list[list[int]]) -> torch.Tensor:
        rows = [row + [-7] * (width - len(row)) for row in values]
        return torch.tensor(rows, dtype=torch.int32).view(len(trees), width)

    return DraftTrees(
        padded([[node.token for node in tree] for tree in trees]),
        padded([[node.parent for node in tree] for tree in trees]),
        padded([[node.depth for node in tree] for tree in trees]),
        torch.tensor([len(tree) for tree in trees], dtype=torch.int32),
    )


def random_tree(
    source: random.Random,
    num_nodes: int,
    shape: str = "any",
    vocab: int = 1000,
    max_depth: int = 1000,
) -> list[Node]:
    """A tree in topological order with distinct siblings: a "chain", "wide" (depth 1) or any."""
    root = Node(-1, ROOT, 0, 0.0)
    tree: list[Node] = []
    used: set[tuple[int, int]] = set()
    while len(tree) < num_nodes:
        parent = {"chain": len(tree) - 1, "wide": ROOT}.get(
            shape, source.randint(ROOT, len(tree) - 1)
        )
        token = source.randrange(vocab)
        above = root if parent == ROOT else tree[parent]
        if (parent, token) in used or above.depth == max_depth:
            continue
        used.add((parent, token))
        score = above.score - source.choice([0.0, 0.25, 1.0])
        tree.append(Node(token, parent, above.depth + 1, score))
    return tree


def pack_nodes(trees: Sequence[Sequence[Node]]) -> SuperTree:
    return pack_trees(draft_trees(trees))


def path_lists(paths: AcceptedPaths) -> list[tuple[list[int], list[int]]]:
    """Per request (outputs, accepted rows) without padding; checks that the rest is padding."""
    lists = []
    for r, accepted in enumerate(paths.num_accepted.tolist()):
        tokens, rows = paths.tokens[r].tolist(), paths.rows[r].tolist()
        assert set(tokens[accepted + 1 :]) <= {-1} and set(rows[accepted:]) <= {-1}
        lists.append((tokens[: accepted + 1], rows[:accepted]))
    return lists


def is_first_child(tree: SuperTree, request: int, row: int) -> bool:
    """Whether no earlier row of the request has the same parent as ``row``."""
    parents = tree.parents[tree.cu_rows[request] : tree.cu_rows[request + 1]].tolist()
    return parents.index(parents[row]) == row


@dataclass
class Tally:
    """Shows that a test of acceptance accepted anything, and not first children only."""

    accepted: int = 0
    through_later_siblings: int = 0
    stopped_early: int = 0
    """Walks that ended at a node with children."""

    def add(self, tree: SuperTree, paths: AcceptedPaths) -> None:
        for request, (_, rows) in enumerate(path_lists(paths)):
            self.accepted += len(rows)
            self.through_later_siblings += sum(
                not is_first_child(tree, request, row) for row in rows
            )
            parents = tree.parents[tree.cu_rows[request] : tree.cu_rows[request + 1]].tolist()
            self.stopped_early += (rows[-1] if rows else 0) in parents

    def assert_all_happened(self) -> None:
        assert self.accepted > 0
        assert self.through_later_siblings > 0
        assert self.stopped_early > 0


def row_paths(tree: SuperTree) -> list[tuple[int, ...]]:
    """Per row the drafted tokens that it attends to, which is what its logits are made of."""
    first = [start for start, end in _spans(tree) for _ in range(start, end)]
    local_rows = [sorted(bits_of(words)) for words in tree.ancestors]
    tokens = tree.tokens.tolist()
    return [
        tuple(tokens[start + row] for row in rows if row > 0)
        for start, rows in zip(first, local_rows, strict=True)
    ]


def _spans(tree: SuperTree) -> list[tuple[int, int]]:
    offsets = tree.cu_rows.tolist()
    return list(zip(offsets[:-1], offsets[1:], strict=True))
