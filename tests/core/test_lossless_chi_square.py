# SPDX-License-Identifier: Apache-2.0
"""Losslessness at temperature 1 by chi-square: 20,000 sampled steps against plain decoding's law.

Each test compares p-values with FALSE_ALARM. Under the null hypothesis a p-value is uniform, so
with another seed one comparison fails with probability 1e-4, and one test of five comparisons with
at most 5e-4. Seeds are fixed: a run passes always or never.
"""

from collections.abc import Callable

import pytest
import torch

from tests.core.kit import draft_trees
from vllm_echo.core.accept import walk_paths
from vllm_echo.core.pack import pack_trees
from vllm_echo.core.tree import DraftTrees
from vllm_echo.reference.draft import path_to
from vllm_echo.reference.schedule import Node

FALSE_ALARM = 1e-4
NUM_SAMPLES = 20_000
VOCAB = 5
LENGTH = 3  # outputs of a step down a tree of depth 2

TREES = {
    "bushy": [
        Node(0, -1, 1, 0.0),
        Node(1, -1, 1, 0.0),
        Node(2, 0, 2, 0.0),
        Node(0, 1, 2, 0.0),
        Node(3, 1, 2, 0.0),
    ],
    "wide": [Node(token, -1, 1, 0.0) for token in (4, 2, 0)],
    "chain": [Node(1, -1, 1, 0.0), Node(1, 0, 2, 0.0)],
    "full": [Node(token, -1, 1, 0.0) for token in range(VOCAB)]
    + [Node(token, 2, 2, 0.0) for token in range(VOCAB)],
    "root alone": [],
}
# A sibling that stands twice: harmless to our rule, poison for rules that try sibling by sibling.
TREES_WITH_DUPLICATES = {
    "duplicates": [Node(1, -1, 1, 0.0), Node(1, -1, 1, 0.0), Node(0, 0, 2, 0.0)],
}

Model = list[torch.Tensor]
"""Per depth d the laws after each path of d tokens, [VOCAB ** d, VOCAB] at ``code(path)``."""
Verifier = Callable[[list[Node], Model, torch.Generator], torch.Tensor]
"""Outputs of NUM_SAMPLES steps, [NUM_SAMPLES, LENGTH], -1 after a step's last one."""


def random_model(seed: int) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(VOCAB**depth, VOCAB, generator=generator, dtype=torch.float64).softmax(dim=1)
        for depth in range(LENGTH)
    ]


def code(path: tuple[int, ...]) -> int:
    value = 0
    for token in path:
        value = value * VOCAB + token
    return value


def row_laws(tree: list[Node], model: Model) -> torch.Tensor:
    """[rows, VOCAB]: the target's law at the root and at each node."""
    paths = [(), *(path_to(tree, index) for index in range(len(tree)))]
    return torch.stack([model[len(path)][code(path)] for path in paths])


def draw(laws: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.multinomial(laws, 1, generator=generator).flatten()


def verify_by_walk(tree: list[Node], model: Model, generator: torch.Generator) -> torch.Tensor:
    """The acceptance under test, all samples as requests of one super-tree."""
    one = draft_trees([tree])
    copies = [field.expand(NUM_SAMPLES, -1) for field in (one.tokens, one.parents, one.depths)]
    packed = pack_trees(DraftTrees(*copies, one.num_nodes.expand(NUM_SAMPLES)))
    laws = row_laws(tree, model)
    paths = walk_paths(
        packed,
        lambda requests, rows: draw(laws[rows - packed.cu_rows[requests].long()], generator),
    )
    parents = [node.parent for node in tree]
    later_siblings = [row for row, node in enumerate(tree, 1) if node.parent in parents[: row - 1]]
    tokens = {(node.parent, node.token) for node in tree}
    assert paths.num_accepted.any() or not tree
    if len(tokens) > len(set(parents)):  # siblings, and not only repeated ones
        assert torch.isin(paths.rows, torch.tensor(later_siblings)).any()
    return torch.nn.functional.pad(paths.tokens, (0, LENGTH - paths.tokens.shape[1]), value=-1)


def completed(outputs: torch.Tensor, model: Model, generator: torch.Generator) -> torch.Tensor:
    """Plain sampling goes on where a step ended: [NUM_SAMPLES, LENGTH] without -1."""
    tokens = outputs.long().clone()
    history = torch.zeros(tokens.shape[0], dtype=torch.int64)
    for depth in range(LENGTH):
        ended = (tokens[:, depth] < 0).nonzero().flatten()
        if ended.numel():
            tokens[ended, depth] = draw(model[depth][history[ended]], generator)
        history = history * VOCAB + tokens[:, depth]
    return tokens


def p_values(tokens: torch.Tensor, model: Model) -> dict[str, float]:
    """Of each output alone, and of neighbours jointly."""
    joint = model[0][0]
    for depth in range(1, LENGTH):
        joint = joint[..., None] * model[depth].view(*[VOCAB] * depth, VOCAB)
    cells = torch.zeros_like(joint)
    cells.index_put_(
        tuple(tokens.T), torch.ones(tokens.shape[0], dtype=cells.dtype), accumulate=True
    )
    views = {"first": (1, 2), "second": (0, 2), "third": (0, 1), "1, 2": (2,), "2, 3": (0,)}
    return {name: p_value(cells.sum(others), joint.sum(others)) for name, others in views.items()}


def p_value(observed: torch.Tensor, law: torch.Tensor) -> float:
    """Chi-square's upper tail: Q(df / 2, x / 2)."""
    expected = law * observed.sum()
    assert expected.min() >= 5, "too few samples for the chi-square approximation"
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = torch.tensor((law.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


def checked(verifier: Verifier, tree: list[Node], seed: int) -> dict[str, float]:
    model = random_model(seed)
    generator = torch.Generator().manual_seed(seed)
    outputs = verifier(tree, model, generator)
    return p_values(completed(outputs, model, generator), model)


@pytest.mark.parametrize("name", [*TREES, *TREES_WITH_DUPLICATES])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_walk_samples_plain_decodings_law(name: str, seed: int) -> None:
    tree = {**TREES, **TREES_WITH_DUPLICATES}[name]
    values = checked(verify_by_walk, tree, seed)
    assert min(values.values()) > FALSE_ALARM, values


def verify_sibling_by_sibling(
    tree: list[Node],
    model: Model,
    generator: torch.Generator,
    chance: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """A wrong verifier: tries the children of a node in turn, each with ``chance(laws, rank)`` of
    its token and without taking it out of the law when it is refused."""
    laws = row_laws(tree, model)
    outputs = torch.full((NUM_SAMPLES, LENGTH), -1)
    rows = torch.zeros(NUM_SAMPLES, dtype=torch.int64)
    walking = torch.ones(NUM_SAMPLES, dtype=torch.bool)
    for depth in range(LENGTH):
        at_node = rows.clone()
        stepped = torch.zeros_like(walking)
        for child, node in enumerate(tree, start=1):
            rank = sum(other.parent == node.parent for other in tree[: child - 1])
            chances = chance(laws[at_node, node.token], rank)
            luck = torch.rand(NUM_SAMPLES, generator=generator, dtype=torch.float64)
            step = walking & ~stepped & (at_node == node.parent + 1) & (luck < chances)
            outputs[step, depth], rows[step] = node.token, child
            stepped |= step
        ended = (walking & ~stepped).nonzero().flatten()
        if ended.numel():
            outputs[ended, depth] = draw(laws[at_node[ended]], generator)
        walking = stepped
    return outputs


def by_target_probability(laws: torch.Tensor, rank: int) -> torch.Tensor:
    return laws


def by_draft_probability(laws: torch.Tensor, rank: int) -> torch.Tensor:
    """0.5, 0.25, ...: as the draft model ranks them, whatever the target says."""
    return torch.full_like(laws, 0.5 ** (rank + 1))


@pytest.mark.parametrize(
    ("chance", "name"),
    [
        (by_target_probability, "bushy"),
        (by_target_probability, "duplicates"),
        (by_draft_probability, "chain"),
        (by_draft_probability, "bushy"),
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_chi_square_has_the_power_to_catch_biased_acceptance(
    chance: Callable[[torch.Tensor, int], torch.Tensor], name: str, seed: int
) -> None:
    """Negative control: siblings tried one by one, repeated siblings, acceptance by draft
    probability. Each is far beyond chance, so that a weaker bias would be seen too."""

    def verifier(tree: list[Node], model: Model, generator: torch.Generator) -> torch.Tensor:
        return verify_sibling_by_sibling(tree, model, generator, chance)

    values = checked(verifier, {**TREES, **TREES_WITH_DUPLICATES}[name], seed)
    assert min(values.values()) < 1e-12, values


def test_a_fair_sampler_passes_the_same_check() -> None:
    """The check itself is fair: plain decoding, step by step, is not refused."""

    def plain(tree: list[Node], model: Model, generator: torch.Generator) -> torch.Tensor:
        return torch.full((NUM_SAMPLES, LENGTH), -1)

    assert min(checked(plain, [], seed=3).values()) > FALSE_ALARM
