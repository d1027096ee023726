# SPDX-License-Identifier: Apache-2.0
"""The greedy walk over logits: which token is the likeliest, and which rows are looked at."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_echo import ops
from vllm_echo.reference import accept as reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = torch.inf, torch.nan


def roots(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(cu_rows, tokens, parents) of requests without nodes."""
    cu_rows = torch.arange(count + 1, dtype=torch.int32)
    return cu_rows, torch.zeros(count, dtype=torch.int32), torch.full_like(cu_rows[1:], -1)


def likeliest(logits: torch.Tensor) -> list[int]:
    return ops.accept_greedy(logits, *roots(logits.shape[0]))[0].flatten().tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 63, 64, 65, 129, 1000, 49_152])
def test_the_likeliest_token_is_torchs(simd: str, dtype: torch.dtype, vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(9, vocab).to(dtype)
    assert likeliest(logits) == logits.float().argmax(dim=-1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_token(simd: str, dtype: torch.dtype) -> None:
    """A few values only, so that nearly every row's largest one stands in many places."""
    torch.manual_seed(0)
    logits = torch.randint(-2, 3, (50, 300)).to(dtype)
    logits[7:20, :200] = -5
    logits[20] = 0.0
    logits[21] = -0.0
    logits[21, 3] = 0.0  # equal to -0.0
    got = likeliest(logits)
    assert got == logits.float().argmax(dim=-1).tolist()
    assert got[20:22] == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 64, 100])
def test_infinities_and_nan_count_as_in_torch(simd: str, dtype: torch.dtype, vocab: int) -> None:
    logits = torch.zeros(7, vocab)
    logits[0] = -INF
    logits[1] = -INF
    logits[1, vocab - 1] = -1e4
    logits[2, 3] = INF
    logits[3, 3], logits[3, 4] = INF, NAN
    logits[4, 2], logits[4, 1] = NAN, NAN
    logits[5] = NAN
    logits[6, vocab - 1] = NAN
    logits = logits.to(dtype)
    got = likeliest(logits)
    assert got == logits.float().argmax(dim=-1).tolist()
    assert got == [0, vocab - 1, 3, 4, 1, 0, vocab - 1]


def test_rows_that_no_walk_visits_are_not_read() -> None:
    """They would end the walk at a NaN, were they asked."""
    parents = torch.tensor([-1, 0, 1, 0, 3], dtype=torch.int32)
    tokens = torch.tensor([0, 5, 6, 7, 8], dtype=torch.int32)
    logits = torch.zeros(5, 32)
    logits[0, 7] = logits[3, 8] = logits[4, 9] = 1.0
    logits[1] = logits[2] = NAN
    out = ops.accept_greedy(logits, torch.tensor([0, 5], dtype=torch.int32), tokens, parents)
    assert [o.tolist() for o in out] == [[[7, 8, 9, -1, -1]], [[3, 4, -1, -1]], [2]]


def test_rows_may_lie_apart() -> None:
    """vLLM cuts the padding of a vocabulary off, which leaves the rows' distance as it was."""
    torch.manual_seed(0)
    wide = torch.randn(6, 80)
    wide[:, 50:] = 9.0
    assert likeliest(wide[:, :50]) == wide[:, :50].argmax(dim=-1).tolist()


def test_no_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="accept_greedy: logits must have 1 to"):
        ops.accept_greedy(torch.zeros(1, 0), *roots(1))


def test_no_request_at_all() -> None:
    shapes = [tuple(t.shape) for t in ops.accept_greedy(torch.zeros(0, 4), *roots(0))]
    assert shapes == [(0, 1), (0, 0), (0,)]


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 12), max_size=12),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
)
def test_any_batch_matches_the_reference(sizes: list[int], seed: int, dtype: torch.dtype) -> None:
    """A vocabulary of three makes long paths and equal siblings frequent."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    cu_rows = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0).int()
    num_rows = int(cu_rows[-1])
    logits = torch.randint(0, 4, (num_rows, 3), generator=generator).to(dtype)
    tokens = torch.randint(-1, 3, (num_rows,), generator=generator, dtype=torch.int32)
    parents = [draw(0, row) if row else -1 for size in sizes for row in range(size)]
    arguments = (logits, cu_rows, tokens, torch.tensor(parents, dtype=torch.int32))
    for got, wanted in zip(
        ops.accept_greedy(*arguments), reference.accept_greedy(*arguments), strict=True
    ):
        assert torch.equal(got, wanted)
