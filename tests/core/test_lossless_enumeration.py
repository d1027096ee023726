# SPDX-License-Identifier: Apache-2.0
"""Losslessness by exact enumeration: over a tiny vocabulary the law of the emitted tokens is that
of plain decoding, as fractions, for random targets and for random, static and gated trees."""

import functools
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from tests.core.kit import (
    CPU,
    Tally,
    pack_nodes,
    path_lists,
    random_tree,
    row_paths,
)
from tests.core.machines import MACHINE
from tests.core.steps import TableHead, draft_batch
from vllm_echo.core.accept import accept_given, walk_paths
from vllm_echo.core.config import POLICIES, EchoConfig, Gate
from vllm_echo.core.cost import StepLoad
from vllm_echo.core.pipeline import EchoPipeline
from vllm_echo.core.tree import SuperTree
from vllm_echo.reference.draft import Limits
from vllm_echo.reference.schedule import Node, to_float32

VOCAB = 4
Tokens = tuple[int, ...]
Law = dict[Tokens, Fraction]
Target = Callable[[Tokens], list[Fraction]]
"""The target's next-token law after a path of tokens."""


def random_target(seed: int) -> Target:
    """Any conditional law, some tokens impossible."""

    @functools.cache
    def law(path: Tokens) -> list[Fraction]:
        source = random.Random(f"{seed}/{path}")
        weights = [source.choice([0, 1, 2, 3, 5, 8]) for _ in range(VOCAB)]
        weights[source.randrange(VOCAB)] += 1
        return [Fraction(weight, sum(weights)) for weight in weights]

    return law


def plain_law(target: Target, length: int) -> Law:
    """Of the first ``length`` tokens of plain decoding."""
    return continued({(): Fraction(1)}, target, length)


def continued(law: Law, target: Target, length: int) -> Law:
    """Outputs extended to ``length`` tokens by plain sampling; impossible ones left out."""
    result: Law = defaultdict(Fraction)
    for tokens, probability in law.items():
        if len(tokens) == length:
            result[tokens] += probability
            continue
        longer = {
            (*tokens, token): probability * chance
            for token, chance in enumerate(target(tokens))
            if chance
        }
        for whole, share in continued(longer, target, length).items():
            result[whole] += share
    return dict(result)


def walked_law(tree: SuperTree, target: Target, tally: Tally) -> Law:
    """Of a step's outputs through ``walk_paths``: every outcome of every draw is played once.

    A row's law is that of the path its mask shows to the target, so a wrong mask is seen too.
    """
    laws = [target(path) for path in row_paths(tree)]
    law: Law = defaultdict(Fraction)
    draws: list[int] = []  # this play's tokens, in order of drawing; counted up like an odometer
    while True:
        probability, drawn = Fraction(1), 0

        def sample(requests: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            nonlocal probability, drawn
            (row,) = rows.tolist()
            draws.extend([0] * (drawn == len(draws)))
            probability *= laws[row][draws[drawn]]
            drawn += 1
            return torch.tensor([draws[drawn - 1]])

        paths = walk_paths(tree, sample)
        ((outputs, _),) = path_lists(paths)
        if probability:
            law[tuple(outputs)] += probability
            tally.add(tree, paths)
        assert drawn == len(draws) == len(outputs)
        while draws and draws[-1] == VOCAB - 1:
            draws.pop()
        if not draws:
            return dict(law)
        draws[-1] += 1


def given_law(nodes: list[Node], target: Target, tally: Tally) -> Law:
    """Of a step's outputs through ``accept_given``: one copy of the tree for each way in which all
    its rows can be sampled."""
    laws = [target(path) for path in row_paths(pack_nodes([nodes]))]
    samples = list(itertools.product(range(VOCAB), repeat=len(laws)))
    tree = pack_nodes([nodes] * len(samples))
    paths = accept_given(tree, torch.tensor(samples).flatten())
    law: Law = defaultdict(Fraction)
    for tokens, (outputs, _) in zip(samples, path_lists(paths), strict=True):
        probability = Fraction(1)
        for row, token in enumerate(tokens):
            probability *= laws[row][token]
        if probability:
            law[tuple(outputs)] += probability
    tally.add(tree, paths)
    return dict(law)


def assert_lossless(law: Law, target: Target, length: int) -> None:
    assert sum(law.values()) == 1
    assert continued(law, target, length) == plain_law(target, length)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_random_trees_are_lossless(depth: int) -> None:
    tally = Tally()
    for seed in range(25):
        source = random.Random(seed)
        # Half of the drafted tokens are none that the target knows.
        nodes = random_tree(source, source.randint(1, 7), vocab=2 * VOCAB, max_depth=depth)
        target = random_target(seed)
        assert_lossless(walked_law(pack_nodes([nodes]), target, tally), target, depth + 1)
    tally.assert_all_happened()


@pytest.mark.parametrize("num_nodes", [2, 3, 5])
def test_random_trees_are_lossless_through_the_compiled_walk(num_nodes: int) -> None:
    tally = Tally()
    for seed in range(3):
        nodes = random_tree(random.Random(seed), num_nodes, vocab=VOCAB, max_depth=3)
        target = random_target(seed)
        law = given_law(nodes, target, tally)
        assert law == walked_law(pack_nodes([nodes]), target, Tally())
        assert_lossless(law, target, 4)
    tally.assert_all_happened()


def drafted_children(target: Target, seed: int, trust: float) -> Callable[..., list]:
    """A draft model that knows the target's law with weight ``trust``, best child first."""

    def children(request: int, path: Tokens) -> list[tuple[int, float]]:
        source = random.Random(f"{seed}/{request}/{path}")
        noise = [source.random() for _ in range(VOCAB)]
        law = target((request, *path))
        probs = [
            trust * float(law[token]) + (1 - trust) * noise[token] / sum(noise)
            for token in range(VOCAB)
        ]
        ranked = sorted(range(VOCAB), key=lambda token: -probs[token])
        return [(token, to_float32(math.log(max(probs[token], 1e-30)))) for token in ranked]

    return children


@pytest.mark.parametrize("trust", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_trees_that_gates_and_budget_shaped_are_lossless(policy: str, trust: float) -> None:
    """Whatever the draft model knows of the target, and although the budget of one request
    depends on the others' confidence: pruning by draft probability biases nothing."""
    tally = Tally()
    sizes = set()
    for seed in range(6):
        config = EchoConfig(
            num_speculative_tokens=7,
            policy=policy,
            k_max=10,
            max_depth=3,
            target_depth=3,
            top_k=3,
            gates=(Gate(0, 0.35), Gate(2, 0.1)),
            profile=MACHINE,
        )
        pipeline = EchoPipeline(config, 3, CPU)
        both = random_target(seed)  # of request and path together
        head = TableHead(drafted_children(both, seed, trust), 3, pipeline.policy)
        load = StepLoad(3)
        offer = pipeline.policy.offer(load)
        batch = draft_batch([Limits(7)] * 3)
        trees = pipeline.propose_trees(head, batch, torch.arange(3), offer, load).trees
        for request in range(3):

            def target(path: Tokens, request: int = request, both: Target = both) -> list[Fraction]:
                return both((request, *path))

            one = slice(request, request + 1)
            step = torch.arange(3)[one], trees.tokens[one], trees.num_nodes[one]
            assert_lossless(walked_law(pipeline.pack_step(*step), target, tally), target, 4)
            sizes.add(int(trees.num_nodes[request]))
    assert len(sizes) > 1 or policy == "chain", "the budget never decided anything"
    assert tally.accepted > 0
    assert policy == "chain" or tally.through_later_siblings > 0


def test_the_enumeration_tells_a_biased_rule_from_a_lossless_one() -> None:
    """Negative control: each sibling is tried in turn with its own target probability, and what
    was refused stays in the law. Seldom is that rule right (one child, or impossible ones)."""

    def tried_law(nodes: list[Node], target: Target, index: int, path: Tokens) -> Law:
        law: Law = defaultdict(Fraction)
        left = Fraction(1)
        for child, node in enumerate(nodes):
            if node.parent != index or node.token >= VOCAB:
                continue
            taken = left * target(path)[node.token]
            left -= taken
            below = tried_law(nodes, target, child, (*path, node.token))
            for outputs, probability in below.items():
                law[outputs] += taken * probability
        for token, probability in enumerate(target(path)):
            law[(*path, token)] += left * probability
        return law

    biased = 0
    for seed in range(25):
        source = random.Random(seed)
        nodes = random_tree(source, 6, vocab=VOCAB, max_depth=2)
        target = random_target(seed)
        law = tried_law(nodes, target, -1, ())
        assert sum(law.values()) == 1
        biased += continued(law, target, 3) != plain_law(target, 3)
    assert biased >= 24
