# SPDX-License-Identifier: Apache-2.0
"""Keyed draws: the noise, the law, and that a walk draws what plain decoding would."""

import math
import random

import pytest
import torch

from tests.ops.calls import sampled_arguments
from vllm_echo import ops
from vllm_echo.reference.noise import murmur3, sample

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw_roots(
    logits: torch.Tensor, temperatures: list[float], seeds: list[int], positions: list[int]
) -> list[int]:
    """One draw of every row."""
    rows = logits.shape[0]
    nothing = torch.full((rows,), -1, dtype=torch.int32)
    out, _, accepted = ops.accept_sampled(
        logits,
        torch.arange(rows + 1, dtype=torch.int32),
        nothing,
        nothing,
        nothing * 0,
        torch.tensor(temperatures),
        torch.tensor(seeds),
        torch.tensor(positions),
    )
    assert accepted.sum() == 0
    return out[:, 0].tolist()


def test_the_hash_is_murmur3() -> None:
    """Published vectors of the 32-bit variant, seed 0, of whole words."""
    assert murmur3(b"") == 0
    assert murmur3(b"test") == 0xBA6BD213
    assert murmur3(b"\x21\x43\x65\x87") == 0xF55B516B


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 15, 64, 65, 300])
def test_draws_are_those_of_the_obvious_version(simd: str, dtype: torch.dtype, vocab: int) -> None:
    """Extreme seeds and positions; catches a word of the key that is lost, and noise that belongs
    to another place of the row."""
    source = random.Random(vocab)
    generator = torch.Generator().manual_seed(vocab)
    logits = (2 * torch.randn(40, vocab, generator=generator)).to(dtype)
    seeds = [source.choice([0, 1, -1, 2**31, 2**63 - 1, -(2**63), 7]) for _ in range(40)]
    positions = [source.choice([0, 1, 77, 2**31, 2**32 + 1]) for _ in range(40)]
    temperatures = [source.choice([0.0, 0.3, 1.0, 2.5]) for _ in range(40)]
    expected = [
        sample(row, torch.tensor(t).item(), seed, position)
        for row, t, seed, position in zip(logits, temperatures, seeds, positions, strict=True)
    ]
    assert draw_roots(logits, temperatures, seeds, positions) == expected


def test_draws_follow_the_law(simd: str) -> None:
    """Chi-square over 7 tokens, by seed and by position; a wrong temperature fails it."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, 0.5, -3.0])
    count = 20_000
    for seeds, positions in (
        (list(range(count)), [5] * count),
        ([9] * count, list(range(count))),
    ):
        drawn = draw_roots(logits.expand(count, 7), [0.8] * count, seeds, positions)
        seen = torch.bincount(torch.tensor(drawn), minlength=7)
        for temperature, fits in ((0.8, True), (0.9, False)):
            expected = count * (logits / temperature).softmax(dim=0)
            chi_square = float(((seen - expected) ** 2 / expected).sum())
            assert (chi_square < 27.9) is fits  # 1 - 10^-4 quantile, 6 degrees of freedom


def test_a_walk_draws_what_plain_decoding_draws(simd: str) -> None:
    """Node tokens are those of plain decoding, among others: the walk accepts them all, and its
    tokens are plain decoding's whatever else the tree holds."""
    source = random.Random(0)
    vocab, accepted_in_all = 50, 0
    for seed in range(30):
        temperature, root, depth = 0.9, 1000 + seed, 4
        rows = torch.randn(depth + 1, vocab)  # the target's logits after 0 .. 4 accepted tokens
        plain = [
            draw_roots(rows[d : d + 1], [temperature], [seed], [root + d])[0]
            for d in range(depth + 1)
        ]
        # Layer d: a wrong sibling, then the right one; children hang below the right one.
        tokens, parents, depths, logits = [-1], [-1], [0], [rows[0]]
        above = 0
        for d in range(1, depth + 1):
            wrong = next(t for t in source.sample(range(vocab), 2) if t != plain[d - 1])
            tokens += [wrong, plain[d - 1]]
            parents += [above, above]
            depths += [d, d]
            logits += [torch.full((vocab,), math.nan), rows[d]]
            above = len(tokens) - 1
        out, path, accepted = ops.accept_sampled(
            torch.stack(logits),
            torch.tensor([0, len(tokens)], dtype=torch.int32),
            torch.tensor(tokens, dtype=torch.int32),
            torch.tensor(parents, dtype=torch.int32),
            torch.tensor(depths, dtype=torch.int32),
            torch.tensor([temperature]),
            torch.tensor([seed]),
            torch.tensor([root]),
        )
        assert out[0, : depth + 1].tolist() == plain
        assert path[0, :depth].tolist() == [2, 4, 6, 8]
        accepted_in_all += int(accepted)
    assert accepted_in_all == 30 * 4


def test_temperature_0_is_greedy(simd: str) -> None:
    logits = torch.randn(64, 333)
    drawn = draw_roots(logits, [0.0] * 64, list(range(64)), list(range(64)))
    assert drawn == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("name", ["depths", "temperatures", "seeds", "root_positions"])
def test_another_number_of_rows_or_requests_is_refused_by_name(name: str) -> None:
    arguments = sampled_arguments()
    arguments[name] = arguments[name].repeat(2)
    with pytest.raises(ValueError, match=f"accept_sampled: {name} must have size"):
        ops.accept_sampled(**arguments)
