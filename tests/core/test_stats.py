# SPDX-License-Identifier: Apache-2.0
"""A step's counts are what one counts node by node, for every policy and any tree."""

import math
import random

import pytest
import torch

from tests.core.kit import draft_trees, random_tree, random_walk
from vllm_echo.core.budget import Offer
from vllm_echo.core.config import EchoConfig, Gate
from vllm_echo.core.cost import StepLoad
from vllm_echo.core.draft import DraftBatch, Frontier
from vllm_echo.core.pack import pack_roots, pack_trees
from vllm_echo.core.pipeline import EchoPipeline, Proposal
from vllm_echo.core.stats import StepStats, Undrafted, nodes_moved
from vllm_echo.core.tree import AcceptedPaths, DraftTrees, SuperTree

CPU = torch.device("cpu")
SEEDS = range(40)


class RandomHead:
    """``vllm_echo.core.draft.DraftHead`` whose children are any tokens with falling probabilities;
    some are no numbers."""

    def __init__(self, num_requests: int, seed: int):
        self._num_requests = num_requests
        self._gen = torch.Generator().manual_seed(seed)

    def expand_roots(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._children((self._num_requests, width))

    def expand(self, frontier: Frontier, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._children((*frontier.tokens.shape, width))

    def _children(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = -torch.rand(shape, generator=self._gen).sort(dim=-1).values
        log_probs[torch.rand(shape, generator=self._gen) < 0.05] = torch.nan
        tokens = torch.arange(shape[-1], dtype=torch.int32).expand(shape)
        return tokens, log_probs


def random_proposal(source: random.Random, config: EchoConfig, offered: int) -> Proposal:
    num_requests = source.randint(1, 9)
    most = config.num_speculative_tokens

    def column(values: list) -> torch.Tensor:
        return torch.tensor(
            values, dtype=torch.bool if isinstance(values[0], bool) else torch.int32
        )

    rows = range(num_requests)
    batch = DraftBatch(
        max_nodes=column([source.randint(1, most) for _ in rows]),
        can_expand=column([source.random() < 0.8 for _ in rows]),
        chain_only=column([source.random() < 0.2 for _ in rows]),
        max_depths=column([source.randint(1, most) for _ in rows]),
        sampled=column([False for _ in rows]),
    )
    return EchoPipeline(config, num_requests, CPU).propose_trees(
        RandomHead(num_requests, source.randrange(2**31)),
        batch,
        torch.arange(num_requests),
        Offer(offered),
        StepLoad(num_requests, 0, 0),
    )


def count(tally: list[int], place: int) -> None:
    """Add 1 at ``place`` of a list that is as long as it needs to be."""
    tally.extend([0] * (place + 1 - len(tally)))
    tally[place] += 1


def node_by_node(
    tree: SuperTree, paths: AcceptedPaths, proposal: Proposal | None
) -> tuple[StepStats, list[int]]:
    """The same counts, the obvious way; and the accepted nodes by depth."""
    stats, accepted = StepStats(), []
    for request in range(tree.num_requests):
        start, end = tree.cu_rows[request : request + 2].tolist()
        for row in range(start + 1, end):
            count(stats.verified, int(tree.depths[row]) - 1)
        if end - start == 1:
            continue
        path = [row for row in paths.rows[request].tolist() if row >= 0]
        for row in path:
            count(accepted, int(tree.depths[start + row]) - 1)
        count(stats.emitted, len(path))
    if proposal is None:
        stats.steps_without_drafts = 1
        return stats, accepted
    stats.steps_with_drafts = 1
    for scores, depths in zip(proposal.candidates.scores, proposal.candidates.depths, strict=True):
        for score, depth in zip(scores.tolist(), depths.tolist(), strict=True):
            if math.isfinite(score):
                count(stats.drafted, depth - 1)
    for scores, cap in zip(
        proposal.candidates.scores.tolist(), proposal.growth.limits.caps.tolist(), strict=True
    ):
        if not any(map(math.isfinite, scores)):
            count(stats.undrafted, Undrafted.NO_SCORE if cap else Undrafted.NO_BUDGET)
    stats.offered = proposal.decision.budget
    for depths, num_nodes in zip(
        proposal.trees.depths.tolist(), proposal.trees.num_nodes.tolist(), strict=True
    ):
        layers = set(depths[:num_nodes])
        stats.used += num_nodes
        stats.on_depth += len(layers)
        stats.on_width += num_nodes - len(layers)
    stats.moved = moved_one_by_one(proposal.trees.num_nodes.tolist(), stats.offered)
    for tally, seen in (
        (stats.gate_passes, proposal.growth.passed),
        (stats.gate_truncations, proposal.growth.cut),
    ):
        for depth, requests in sorted(seen.items()):
            tally.extend([0] * (depth + 1 - len(tally)))
            tally[depth] = requests
    return stats, accepted


def moved_one_by_one(counts: list[int], offered: int) -> int:
    """Give the even split to those who hold most first, and count what sticks out."""
    share, rest = divmod(offered, len(counts))
    shares = [share + (place < rest) for place in range(len(counts))]
    return sum(
        max(0, held - fair) for held, fair in zip(sorted(counts, reverse=True), shares, strict=True)
    )


@pytest.mark.parametrize("policy", ["echo", "dense", "fixed-threshold", "static", "ddd", "chain"])
def test_a_step_is_counted_as_node_by_node(policy: str) -> None:
    total, emitted = StepStats(), 0
    for seed in SEEDS:
        source = random.Random(f"{policy}/{seed}")
        trees = [random_tree(source, source.choice([0, 1, 5, 12])) for _ in range(7)]
        tree = pack_trees(draft_trees(trees))
        paths = random_walk(source, tree)
        gates = tuple(Gate(depth, source.choice([0.1, 0.5])) for depth in (0, 2))
        config = EchoConfig(policy=policy, k_max=32, gates=gates, transfer=source.random() < 0.5)
        proposal = random_proposal(source, config, source.choice([1, 7, 32, 1000]))
        stats = StepStats.of_step(tree, paths, proposal)
        expected, accepted = node_by_node(tree, paths, proposal)
        # A layer of which every candidate is impossible leaves a count of 0 at the end.
        while len(stats.drafted) > len(expected.drafted):
            assert stats.drafted.pop() == 0
        assert stats == expected
        assert stats.accepted == accepted
        assert stats.on_depth + stats.on_width == stats.used <= stats.offered
        total.merge(stats)
        emitted += sum(len(tree) > 0 for tree in trees)
    assert sum(total.emitted) == emitted
    assert total.num_steps == len(SEEDS)
    assert sum(total.undrafted[: Undrafted.NO_SCORE]) > 0, "no budget that does not move ran out"
    gated = policy in ("echo", "dense", "fixed-threshold")
    assert (sum(total.gate_passes) > 0) == (sum(total.gate_truncations) > 0) == gated
    assert (total.on_width == 0) == (policy == "chain")


def test_a_step_without_drafts_counts_itself_only() -> None:
    paths = AcceptedPaths(
        torch.zeros(3, 1, dtype=torch.int32),
        torch.zeros(3, 0, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
    )
    stats = StepStats.of_step(pack_roots(3, CPU), paths, None)
    assert stats == StepStats(steps_without_drafts=1)
    assert stats.accepted == []


def test_who_was_left_out_adds_to_whose_head_gave_no_number() -> None:
    """A head with NaN drafts for its requests in vain, in every step, and nobody would know."""
    proposal = random_proposal(random.Random(5), EchoConfig(policy="echo", k_max=32), 32)
    scores = proposal.candidates.scores
    scores[scores.shape[0] // 2] = torch.nan
    in_vain = int((~scores.isfinite().any(dim=1)).sum())
    assert in_vain >= 1
    tree = pack_roots(3, CPU)
    left_out = [2, 0, 1]
    stats = StepStats.of_step(tree, random_walk(random.Random(0), tree), proposal, left_out)
    assert stats.undrafted == [2, 0, 1, 0, 0, 0, 0, 0, 0, 0, in_vain]
    assert left_out == [2, 0, 1], "the caller's list"


def test_requests_without_nodes_emit_no_accepted_length() -> None:
    """Beside others that have some: plain decoding and prefill are no tree of length one."""
    source = random.Random(1)
    trees = [random_tree(source, nodes) for nodes in (0, 3, 0)]
    tree = pack_trees(draft_trees(trees))
    assert sum(StepStats.of_step(tree, random_walk(source, tree), None).emitted) == 1


@pytest.mark.parametrize("policy", ["echo", "static"])
def test_nothing_moves_where_transfer_is_off(policy: str) -> None:
    moved = {True: 0, False: 0}
    for transfer in moved:
        for seed in SEEDS:
            config = EchoConfig(policy=policy, k_max=32, transfer=transfer)
            proposal = random_proposal(random.Random(seed), config, 11)
            tree = pack_roots(1, CPU)
            no_path = random_walk(random.Random(0), tree)
            moved[transfer] += StepStats.of_step(tree, no_path, proposal).moved
    assert moved[False] == 0 < moved[True]


@pytest.mark.parametrize(
    ("counts", "offered", "moved"),
    [
        ([4, 4, 4, 4], 16, 0),
        ([7, 1, 4, 4], 16, 3),
        ([5, 5, 4, 4], 18, 0),  # the two that are left over go to whoever has them
        ([6, 4, 4, 4], 18, 1),
        ([8, 0], 64, 0),  # plenty for everybody: nothing had to move
        ([3, 0, 0], 3, 2),
        ([0, 0], 0, 0),
    ],
)
def test_moved_nodes(counts: list[int], offered: int, moved: int) -> None:
    assert nodes_moved(torch.tensor(counts, dtype=torch.int32), offered) == moved
    assert moved_one_by_one(counts, offered) == moved


def test_counts_survive_the_way_between_processes() -> None:
    source = random.Random(5)
    proposal = random_proposal(source, EchoConfig(policy="echo", k_max=32), 32)
    tree = pack_trees(draft_trees([random_tree(source, 6), random_tree(source, 2)]))
    stats = StepStats.of_step(tree, random_walk(source, tree), proposal)
    values = stats.to_dict()
    assert StepStats.from_dict(values) == stats
    numbers = [
        n for value in values.values() for n in (value if isinstance(value, list) else [value])
    ]
    assert all(type(number) is int for number in numbers)


def test_merging_adds_lists_of_any_length() -> None:
    first, second = StepStats(used=3, verified=[2, 1]), StepStats(used=4, verified=[1, 1, 5])
    first.merge(second)
    assert first == StepStats(used=7, verified=[3, 2, 5])
    assert second == StepStats(used=4, verified=[1, 1, 5])


def test_what_lies_beyond_a_tree_is_counted_nowhere() -> None:
    rubbish = torch.full((2, 4), 99, dtype=torch.int32)
    trees = DraftTrees(rubbish, rubbish, rubbish.clone(), torch.tensor([1, 0], dtype=torch.int32))
    trees.depths[0, 0] = 1
    proposal = random_proposal(random.Random(3), EchoConfig(policy="echo", k_max=32), 8)
    proposal.trees = trees
    stats = StepStats.of_step(
        pack_roots(1, CPU), random_walk(random.Random(0), pack_roots(1, CPU)), proposal
    )
    assert (stats.used, stats.on_depth, stats.on_width) == (1, 1, 0)
