# SPDX-License-Identifier: Apache-2.0
"""Tree attention against the reference, row by row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.kit import (
    NAN,
    TOLERANCE,
    Batch,
    chain_parents,
    make_batch,
    pack_mask,
    random_parents,
)
from vllm_echo import ops
from vllm_echo.reference import attention as reference_attention

TREE_SIZES = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def attend(batch: Batch, softcap: float = 0.0) -> torch.Tensor:
    """The operator, into a poisoned output."""
    out = torch.full_like(batch.query, NAN)
    assert ops.tree_attention(*batch.attention_args, softcap, out) is out
    return out


def assert_matches_reference(batch: Batch, softcap: float = 0.0) -> None:
    wanted = reference_attention.tree_attention(*batch.attention_args, softcap)
    torch.testing.assert_close(attend(batch, softcap), wanted, **TOLERANCE[batch.query.dtype])


def tree(num_rows: int, seed: int = 0) -> list[int]:
    return random_parents(num_rows, torch.Generator().manual_seed(seed)) if num_rows else []


@pytest.mark.parametrize("num_rows", TREE_SIZES)
def test_trees_of_every_size_see_their_ancestors_only(simd: str, num_rows: int) -> None:
    """Sizes around the mask's words and the kernel's steps: a wrong word or bit shows here."""
    assert_matches_reference(make_batch([tree(num_rows)], [37]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("heads", [(9, 3), (8, 8), (8, 1)], ids=["9/3", "8/8", "8/1"])
def test_head_layouts_and_dtypes(
    simd: str, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    trees = [tree(7), tree(12, seed=1)]
    assert_matches_reference(
        make_batch(trees, [45, 3], heads=heads, head_dim=head_dim, dtype=dtype)
    )


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 127, 128, 129, 300])
def test_context_and_tree_cross_blocks_and_steps(simd: str, block_size: int, context: int) -> None:
    """The context ends anywhere in a block, and the tree begins there."""
    assert_matches_reference(make_batch([tree(40)], [context], block_size=block_size))


def test_ragged_batches_with_empty_requests(simd: str) -> None:
    sizes = [0, 5, 1, 0, 33, 2, 0]
    contexts = [9, 0, 64, 0, 130, 31, 5]
    assert_matches_reference(make_batch([tree(n, n) for n in sizes], contexts, heads=(6, 2)))


def test_no_request_and_no_row_are_fine() -> None:
    assert attend(make_batch([], [])).shape == (0, 4, 32)
    assert attend(make_batch([[], []], [10, 0])).shape == (0, 4, 32)


def test_many_requests(simd: str) -> None:
    sizes = [1 + 5 * i % 13 for i in range(40)]
    contexts = [7 * i % 90 for i in range(40)]
    assert_matches_reference(make_batch([tree(n, n) for n in sizes], contexts, head_dim=16))


def test_a_row_that_sees_nothing_is_zero(simd: str) -> None:
    batch = make_batch([tree(3), tree(2)], [0, 20])
    batch.mask[1] = 0
    batch.mask[3:] = 0  # the second request's rows still see their context
    out = attend(batch)
    assert out[1].eq(0).all()
    assert not out[3:].eq(0).all()
    assert_matches_reference(batch)


def test_any_mask_is_honoured_not_only_trees(simd: str) -> None:
    """Holes, bits beyond the own row, and sign bits of words."""
    generator = torch.Generator().manual_seed(3)
    batch = make_batch([chain_parents(130)], [21])
    visible = torch.rand(130, 130, generator=generator) < 0.3
    visible[:, 63] = True
    batch.mask = pack_mask([visible])
    assert batch.mask.lt(0).any()
    assert_matches_reference(batch)


def test_unused_mask_words_may_be_many(simd: str) -> None:
    batch = make_batch([tree(5), tree(9)], [40, 0])
    wide = torch.zeros(14, 9, dtype=torch.int64)
    wide[:, :1] = batch.mask
    batch.mask = wide
    assert_matches_reference(batch)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softcap(simd: str, softcap: float, dtype: torch.dtype) -> None:
    batch = make_batch([tree(9)], [50], dtype=dtype)
    batch.scale = 1.0  # large scores, so that the cap matters
    plain = reference_attention.tree_attention(*batch.attention_args)
    capped = reference_attention.tree_attention(*batch.attention_args, softcap)
    assert not torch.allclose(plain, capped, atol=1e-3)
    assert_matches_reference(batch, softcap)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stale_memory_next_to_visible_slots_is_harmless(simd: str, dtype: torch.dtype) -> None:
    """A sibling's NaN or infinity must not reach a row that does not see it."""
    batch = make_batch([[-1, 0, 0, 1]], [13], dtype=dtype)
    want = attend(batch)
    for slot, poison in [(13 + 1, NAN), (13 + 3, float("inf"))]:
        key_cache, value_cache = batch.caches
        block = int(batch.block_table[0, slot // 32])
        key_cache[block].view(2, 32, 32)[:, :, slot % 32] = poison
        value_cache[block][:, slot % 32] = poison
    got = attend(batch)
    assert torch.equal(got[[0, 2]], want[[0, 2]])
    assert got[[1, 3]].isnan().all()


def test_large_scores_do_not_overflow(simd: str) -> None:
    batch = make_batch([tree(6)], [200])
    batch.scale = 40.0
    out = attend(batch)
    assert out.isfinite().all()
    # At this scale one ulp of a score (about 2^-15) moves a probability by as much.
    wanted = reference_attention.tree_attention(*batch.attention_args)
    torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-3)


def test_strided_queries_and_outputs(simd: str) -> None:
    """vLLM hands over a slice of the fused QKV projection; nothing next to it may be written."""
    batch = make_batch([tree(11)], [70], heads=(6, 2), head_dim=64)
    want = attend(batch)
    fused = torch.full((11, 10, 64), NAN)
    fused[:, :6] = batch.query
    batch.query = fused[:, :6]
    wide = torch.full((11, 2, 8, 80), NAN)
    out = wide[:, 1, 1:7, :64]
    ops.tree_attention(*batch.attention_args, 0.0, out)
    assert torch.equal(out, want)
    wide[:, 1, 1:7, :64] = NAN
    assert wide.isnan().all()


def test_a_request_gives_the_same_bits_alone_and_in_a_batch(simd: str) -> None:
    """Batch invariance: what a user gets must not depend on who else is served."""
    trees = [tree(n, n) for n in (3, 50, 21, 1)]
    batch = make_batch(trees, [100, 17, 140, 300], heads=(9, 3), head_dim=64)
    together = attend(batch)
    for r in range(len(trees)):
        first, last = batch.cu_rows[r : r + 2].tolist()
        alone = Batch(
            batch.query[first:last],
            batch.kv_cache,
            batch.block_table[r : r + 1],
            torch.tensor([0, last - first], dtype=torch.int32),
            batch.context_lens[r : r + 1],
            batch.mask[first:last],
            batch.scale,
        )
        assert torch.equal(attend(alone), together[first:last])


def test_threads_do_not_change_a_bit(simd: str) -> None:
    sizes = [1, 40, 9, 17]
    batch = make_batch([tree(n, n) for n in sizes], [300, 400, 0, 250], heads=(9, 3), head_dim=64)
    before = torch.get_num_threads()
    outputs = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        outputs.append(attend(batch))
    torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_context_in_the_mask_equals_context_in_the_length(simd: str) -> None:
    """Moving slots from the shared context into every row's mask must change nothing."""
    batch = make_batch([tree(10)], [50])
    want = attend(batch)
    visible = torch.ones(10, 60, dtype=torch.bool)
    visible[:, 50:] = torch.tensor([[bool(w >> j & 1) for j in range(10)] for (w,) in batch.mask])
    batch.mask = pack_mask([visible])
    batch.context_lens[:] = 0
    torch.testing.assert_close(attend(batch), want, rtol=1e-5, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 150)), max_size=5),
    heads=st.sampled_from([(1, 1), (2, 1), (6, 3), (7, 1)]),
    head_dim=st.sampled_from([16, 48, 64, 96]),
    block_size=st.sampled_from([16, 32, 64]),
    dtype=st.sampled_from(DTYPES),
    softcap=st.sampled_from([0.0, 5.0]),
    seed=st.integers(0, 2**16),
)
def test_any_batch_matches_the_reference(
    requests: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    softcap: float,
    seed: int,
) -> None:
    trees = [tree(n, seed + i) for i, (n, _) in enumerate(requests)]
    batch = make_batch(
        trees,
        [context for _, context in requests],
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        seed=seed,
    )
    assert_matches_reference(batch, softcap)
