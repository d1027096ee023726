# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels against the CPU operators: on a CPU, thread by thread in several orders.

No GPU is needed, and none of its hazards but the order of threads shows: `make gpu-check` runs the
same comparisons, and compute-sanitizer, on one (ECHO_GPU_CHECK=1).
"""

import math
import os
import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tests.core.kit import as_lists
from tests.core.steps import GATED, decide, drafted_in_full, random_step
from tests.core.test_schedule import at_once
from tests.cuda import emulation
from tests.cuda.device import OnDevice
from tests.ops.kit import pack_mask, random_parents, tree_visibility
from vllm_echo import ops
from vllm_echo.core.tree import DraftTrees
from vllm_echo.reference.attention import tree_part_attention

NAN = math.nan
SIZES = [0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255]


@pytest.fixture(scope="module")
def library() -> SimpleNamespace:
    if os.environ.get("ECHO_GPU_CHECK"):
        return SimpleNamespace(ops=OnDevice(), set_order=lambda order: None)
    handle = emulation.build()
    return SimpleNamespace(ops=torch.ops.vllm_echo_cuda_on_cpu, set_order=handle.set_order)


@pytest.fixture(params=[0, 1, 3], ids=["forwards", "backwards", "scattered"])
def cuda(request: pytest.FixtureRequest, library: SimpleNamespace) -> Iterator[SimpleNamespace]:
    library.set_order(request.param)
    yield library.ops
    library.set_order(0)


def int32(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_tables(source: random.Random, sizes: list[int], width: int) -> tuple[torch.Tensor, ...]:
    """Tokens, parents, depths and counts; what lies beyond a tree is rubbish."""
    tokens = int32([[source.randrange(5) for _ in range(width)] for _ in sizes])
    tokens = tokens.view(len(sizes), width)
    parents = torch.full((len(sizes), width), -77, dtype=torch.int32)
    depths = torch.full((len(sizes), width), -77, dtype=torch.int32)
    for r, size in enumerate(sizes):
        for node in range(size):
            parent = source.randint(-1, node - 1)
            parents[r, node] = parent
            depths[r, node] = 1 if parent < 0 else depths[r, parent] + 1
    return tokens, parents, depths, int32(sizes)


def assert_equal(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", SIZES)
def test_trees_of_any_size_are_packed(cuda: SimpleNamespace, size: int) -> None:
    source = random.Random(size)
    tables = random_tables(source, [size, 0, size // 2, size], max(size, 1))
    rows = 4 + 2 * size + size // 2
    for max_rows in (rows, rows + 70):
        assert_equal(cuda.pack_trees(*tables, max_rows), ops.pack_trees(*tables, max_rows))


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 600])
def test_any_number_of_requests_is_packed(cuda: SimpleNamespace, count: int) -> None:
    source = random.Random(count)
    tables = random_tables(source, [source.randint(0, 4) for _ in range(count)], 4)
    rows = count + int(tables[3].sum())
    assert_equal(cuda.pack_trees(*tables, rows + 3), ops.pack_trees(*tables, rows + 3))


def test_columns_of_wider_tables_are_packed(cuda: SimpleNamespace) -> None:
    tables = random_tables(random.Random(0), [3, 5, 0], 9)
    narrow = (*(table[:, :5] for table in tables[:3]), tables[3])
    assert_equal(cuda.pack_trees(*narrow, 11), ops.pack_trees(*narrow, 11))


def test_malformed_tables_are_packed_within_bounds(cuda: SimpleNamespace) -> None:
    """A node with a wild parent is detached; counts are clamped, and so are rows."""
    parents = int32([[-1, 5, 1, 2**31 - 1, -(2**31)], [1, 0, 2, 3, -2]])
    tokens, depths = int32([[10, 11, 12, 13, 14]] * 2), int32([[1, 2, 3, 4, 5]] * 2)
    cu_rows, _, out_parents, _, ancestors = cuda.pack_trees(
        tokens, parents, depths, int32([99, -5]), 8
    )
    assert cu_rows.tolist() == [0, 6, 7]
    assert out_parents.tolist() == [-1, 0, -1, 2, -1, -1, -1, -1]
    assert ancestors.flatten().tolist() == [1, 0b11, 0b100, 0b1100, 1 << 4, 1 << 5, 1, 0]
    cu_rows = cuda.pack_trees(tokens, parents, depths, int32([5, 5]), 7)[0]
    assert cu_rows.tolist() == [0, 6, 7], "never more rows than there is room for"


def walk_arguments(
    source: random.Random, sizes: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Targets and trees; most targets are the token of some child."""
    tables = random_tables(source, sizes, max([1, *sizes]))
    cu_rows, tokens, parents, _, _ = ops.pack_trees(*tables)
    targets = [source.randrange(5) for _ in range(tokens.shape[0])]
    for first, end in zip(cu_rows[:-1].tolist(), cu_rows[1:].tolist(), strict=True):
        for row in range(first + 1, end):
            if source.random() < 0.7:
                targets[first + int(parents[row])] = int(tokens[row])
    return torch.tensor(targets), cu_rows, tokens, parents


@pytest.mark.parametrize("size", SIZES)
def test_given_tokens_are_walked(cuda: SimpleNamespace, size: int) -> None:
    source = random.Random(size)
    arguments = walk_arguments(source, [size, 0, size // 3, size, 1])
    deepest = max(size, 1)
    expected = ops.accept_paths(*arguments, deepest)
    assert_equal(cuda.accept_paths(*arguments, deepest), expected)
    assert size < 2 or expected[2].sum() > 0
    for max_nodes in (0, 1):
        assert_equal(
            cuda.accept_paths(*arguments, max_nodes), ops.accept_paths(*arguments, max_nodes)
        )


def test_a_request_with_a_wild_parent_accepts_nothing(cuda: SimpleNamespace) -> None:
    """As on the CPU, whatever else would match; and the others are left alone."""
    tokens = int32([0, 1, 1, 1])
    good = [-1, 0, 1, 2]
    for parents in ([-1, 5, 3, 2], [-1, 1, 2, 3], [0, 0, -7, 2**31 - 1], [0, 0, 1, 2]):
        arguments = (
            torch.ones(8, dtype=torch.int64),
            int32([0, 4, 8]),
            tokens.repeat(2),
            int32(parents + good),
        )
        expected = ops.accept_paths(*arguments, 3)
        assert expected[2].tolist() == [0, 3]
        assert_equal(cuda.accept_paths(*arguments, 3), expected)
        logits = torch.zeros(8, 5)
        logits[:, 1] = 1.0
        assert_equal(cuda.accept_greedy(logits, *arguments[1:], 3), expected)


def test_both_widths_of_target_tokens(cuda: SimpleNamespace) -> None:
    targets, *trees = walk_arguments(random.Random(1), [5, 9])
    wide = cuda.accept_paths(targets, *trees, 9)
    assert wide[2].sum() > 0
    assert_equal(cuda.accept_paths(targets.int(), *trees, 9), wide)


def test_wild_prefix_sums_lead_nowhere(cuda: SimpleNamespace) -> None:
    tokens, parents = int32([0, 1, 1, 1]), int32([-1, 0, 1, 2])
    for cu_rows in ([0, 99], [-5, 2], [3, 1], [2**31 - 1, -(2**31)]):
        targets = torch.ones(4, dtype=torch.int64)
        accepted = cuda.accept_paths(targets, int32(cu_rows), tokens, parents, 3)[2]
        assert 0 <= int(accepted) <= 3
        rows = torch.ones(4, 1, 64)
        mask = torch.full((4, 1), -1)
        out, lse = cuda.tree_part_attention(rows, rows, rows, int32(cu_rows), mask, 1.0)
        assert ((out == 0) | (out == 1)).all() and not lse.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 40, 1000, 4099])
def test_logits_are_walked(cuda: SimpleNamespace, dtype: torch.dtype, vocab: int) -> None:
    targets, *trees = walk_arguments(random.Random(0), [4, 0, 9, 3])
    logits = torch.randn(targets.shape[0], vocab).to(dtype)
    logits.scatter_(1, targets.clamp(max=vocab - 1)[:, None], 9.0)
    logits[5, :] = 1.0  # ties go to the lowest token
    expected = ops.accept_greedy(logits, *trees, 9)
    assert_equal(cuda.accept_greedy(logits, *trees, 9), expected)
    assert vocab < 5 or expected[2].sum() > 0
    wide = torch.randn(targets.shape[0], vocab + 3).to(dtype)  # rows that are not aligned
    wide[:, 1 : 1 + vocab] = logits
    assert_equal(cuda.accept_greedy(wide[:, 1 : 1 + vocab], *trees, 9), expected)


def test_a_row_with_a_nan_accepts_nothing_and_ends_its_request_alone(
    cuda: SimpleNamespace,
) -> None:
    """The NaN's own token is what the row says, and a child that carries it is not entered."""
    tables = (int32([[3, 4]] * 2), int32([[-1, 0]] * 2), int32([[1, 2]] * 2), int32([2, 2]))
    cu_rows, tokens, parents, _, _ = ops.pack_trees(*tables)
    logits = torch.zeros(6, 50)
    for row, token in enumerate([3, 4, 9, 3, 4, 9]):
        logits[row, token] = 5.0
    logits[1, 4] = NAN
    for walked in (
        cuda.accept_greedy(logits, cu_rows, tokens, parents, 2),
        ops.accept_greedy(logits, cu_rows, tokens, parents, 2),
    ):
        assert walked[0].tolist() == [[3, 4, -1], [3, 4, 9]]
        assert walked[2].tolist() == [1, 2]


@pytest.mark.parametrize("vocab", [40, 1000])
def test_sampled_walks_draw_the_same_noise(cuda: SimpleNamespace, vocab: int) -> None:
    """The device's logarithm differs in the last bits: near ties aside, tokens are the same."""
    generator = torch.Generator().manual_seed(vocab)
    targets, *trees = walk_arguments(random.Random(0), [4, 0, 9, 3])
    depths = torch.randint(0, 4, (targets.shape[0],), dtype=torch.int32, generator=generator)
    logits = torch.randn(targets.shape[0], vocab, generator=generator)
    logits.scatter_(1, targets[:, None], 9.0)
    accepted = 0
    for seed in range(10):
        draws = (
            torch.tensor([0.0, 0.7, 1.0, 1.3]),
            torch.tensor([seed, -seed, 2**62 + seed, 5]),
            torch.tensor([0, 17, 2**31, 99]),
        )
        expected = ops.accept_sampled(logits, *trees, depths, *draws, 9)
        assert_equal(cuda.accept_sampled(logits, *trees, depths, *draws, 9), expected)
        accepted += int(expected[2].sum())
    assert accepted > 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("head_dim", [64, 6])
def test_paths_are_moved_in_every_layer(
    cuda: SimpleNamespace, dtype: torch.dtype, head_dim: int
) -> None:
    layers, blocks, block_size, heads = 3, 7, 4, 2
    shape = (2, blocks, block_size, heads, head_dim)
    caches = [torch.randint(0, 200, shape).to(dtype) for _ in range(layers)]
    table = torch.randperm(blocks)[:6].int().view(2, 3)
    roots = [1, 3]
    paths = [[1, 3, 4, 7], [2, 3, 4]]
    expected = [cache.clone() for cache in caches]
    for old, cache in zip(caches, expected, strict=True):
        for r, path in enumerate(paths):
            for k, row in enumerate(path, start=1):
                to, come = roots[r] + k, roots[r] + row
                cache[:, table[r, to // block_size], to % block_size] = old[
                    :, table[r, come // block_size], come % block_size
                ]
    padded = int32([path + [-1] * (5 - len(path)) for path in paths])
    cuda.commit_kv(caches, table, int32(roots), padded, int32([len(path) for path in paths]))
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache, wanted)


def test_paths_that_lead_astray_move_nothing_out_of_bounds(cuda: SimpleNamespace) -> None:
    cache = torch.arange(2 * 3 * 4 * 16, dtype=torch.int32).view(torch.float32).view(2, 3, 4, 1, 16)
    for table, root, path in (
        ([0, 1], 2, [2, 2]),
        ([0, 1], 2, [3, 1]),
        ([0, 1], 2, [2, 99]),
        ([0, 1], -9, [2, 3]),
        ([-1, 3], 2, [2, 3]),
        ([0, 2**31 - 1], 2, [2, 3]),
    ):
        moved = cache.clone()
        cuda.commit_kv([moved], int32([table]), int32([root]), int32([path]), int32([2]))
        changed = (moved.view(torch.int32) != cache.view(torch.int32)).any(dim=(0, 3, 4))
        assert int(changed.sum()) <= 1, "what is in bounds may move, nothing else"


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tree_rows_attend_to_their_ancestors(
    cuda: SimpleNamespace, dtype: torch.dtype, head_dim: int
) -> None:
    """Sizes around words of the mask, grouped heads, strided rows; merged with nothing."""
    generator = torch.Generator().manual_seed(head_dim)
    sizes = [1, 5, 66, 2]
    trees = [random_parents(size, generator) for size in sizes]
    total, heads, kv_heads = sum(sizes), 4, 2
    rows = torch.randn(total, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    query, key, value = rows.split([heads, kv_heads, kv_heads], dim=1)
    mask = pack_mask([tree_visibility(tree) for tree in trees])
    cu_rows = torch.tensor([0, *sizes]).cumsum(0).int()
    tolerance = {"rtol": 2**-7, "atol": 2**-7} if dtype != torch.float32 else {}
    for softcap in (0.0, 5.0):
        arguments = (query, key, value, cu_rows, mask, 0.3, softcap)
        out, lse = cuda.tree_part_attention(*arguments)
        expected, expected_lse = tree_part_attention(*arguments)
        torch.testing.assert_close(out.float(), expected, **tolerance)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_a_row_that_sees_nothing_is_zero_with_no_mass(cuda: SimpleNamespace) -> None:
    rows = torch.randn(3, 1, 64)
    mask = torch.tensor([[0], [-1], [1 << 40]])
    out, lse = cuda.tree_part_attention(rows, rows, rows, int32([0, 3]), mask, 1.0)
    assert (out[[0, 2]] == 0).all() and lse[0, [0, 2]].isneginf().all()
    assert lse[0, 1].isfinite(), "bits beyond the request's rows are not looked at"
    for cu_rows, outside in (([0, 2], 2), ([1, 3], 0)):
        out, lse = cuda.tree_part_attention(rows, rows, rows, int32(cu_rows), mask | -1, 1.0)
        assert (out[outside] == 0).all() and lse[0, outside].isneginf(), "a row of no request"


def test_a_score_that_is_no_number_is_not_lost(cuda: SimpleNamespace) -> None:
    """Downstream it ends its request's step; dropped, it would pass for a row without ancestors."""
    rows = torch.randn(3, 1, 64)
    for value in (NAN, torch.inf):
        key = rows.clone()
        key[1] = value
        mask = torch.tensor([[1], [3], [5]])
        out, lse = cuda.tree_part_attention(rows, key, rows, int32([0, 3]), mask, 1.0)
        assert out[1].isnan().any() and not out[[0, 2]].isnan().any()
        assert not lse[0, 1].isneginf() and lse[0, [0, 2]].isfinite().all()


def test_a_candidate_with_a_wild_parent_is_detached(cuda: SimpleNamespace) -> None:
    """-1 would make it a child of the root."""
    two = int32([[1, 2]])
    columns = (two, int32([[-1, 77]]), int32([[1, 2]]), torch.tensor([[-0.5, -0.7]]))
    limits = (int32([4]), int32([4]), torch.full((3,), NAN), 4, True, 2)
    tokens, parents, depths, _, num_nodes = cuda.schedule_budget(*columns, *limits)[:5]
    assert parents.tolist() == [[-1, -2]] and num_nodes.tolist() == [2]
    packed = cuda.pack_trees(tokens, parents, depths, num_nodes, 3)
    assert packed[2].tolist() == [-1, 0, -1]


@pytest.mark.parametrize("seed", range(60))
def test_budgets_are_spent_as_on_the_cpu(cuda: SimpleNamespace, seed: int) -> None:
    source = random.Random(seed)
    step = random_step(source, sizes=[0, 1, 2, 5, 40], policy=GATED)
    full, outcome, expected = drafted_in_full(step), decide(step), at_once(step)
    growth, gates = outcome.growth, outcome.decision.thresholds
    tokens, parents, depths, _, num_nodes, num_layers, truncated, counts = cuda.schedule_budget(
        full.tokens,
        full.parents,
        full.depths,
        full.scores,
        growth.limits.caps,
        growth.limits.deepest,
        torch.tensor([NAN if gate is None else gate for gate in gates]),
        outcome.decision.budget,
        step.config.width,
        step.config.num_speculative_tokens,
    )
    assert as_lists(DraftTrees(tokens, parents, depths, num_nodes)) == as_lists(expected)
    assert_equal((num_layers, truncated), (growth.num_layers, growth.truncated))
    assert int(counts[:, 2].sum()) == sum(outcome.layers)
    for depth in growth.passed:
        assert counts[depth, :2].tolist() == [growth.passed[depth], growth.cut[depth]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.pack_trees(*random_tables(random.Random(0), [1], 1)), "max_rows must be"),
        (
            lambda c: c.accept_paths(*walk_arguments(random.Random(0), [1])),
            "max_nodes must be given",
        ),
        (
            lambda c: c.accept_paths(*walk_arguments(random.Random(0), [1]), -1),
            "max_nodes must not be negative",
        ),
        (
            lambda c: c.tree_part_attention(
                *[torch.zeros(1, 1, 80)] * 3, int32([0, 1]), torch.zeros(1, 1).long(), 1.0
            ),
            "query must have heads of 64, 96, 128 or 256, got 80",
        ),
        (
            lambda c: c.commit_kv(
                [torch.zeros(2, 1, 1, 1, 1)] * 161, *[int32([[0]]), int32([0])] * 2
            ),
            "kv_caches has 161 layers",
        ),
    ],
)
def test_what_a_device_cannot_do_is_refused_by_name(
    library: SimpleNamespace, call: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(library.ops)
