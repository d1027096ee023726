# SPDX-License-Identifier: Apache-2.0
"""The write-behind buffer of draft KV against writing every row at once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_echo.integration.cpu.kv_writer import CHUNK, KvWriter, last_of_each

NUM_SLOTS = 300


class CacheOfRows(KvWriter):
    """Keeps what a row is made of where a head would keep its key and value."""

    def __init__(self) -> None:
        head = torch.nn.Module()
        head.model = torch.nn.Module()
        head.model.layers = torch.nn.ModuleList([torch.nn.Identity()])
        head.combine_hidden_states = lambda states: states.sum(dim=-1)
        super().__init__(head)
        self.cache = np.full((NUM_SLOTS, 3), -1.0)
        self.written: list[int] = []

    def _write(self, token_ids, positions, slots, hidden) -> None:
        assert slots.unique().shape == slots.shape
        self.written.append(slots.shape[0])
        self.cache[slots.numpy()] = torch.stack([token_ids, positions, hidden], dim=1).numpy()


def random_step(source: np.random.Generator, num_rows: int) -> tuple:
    """Rows of a step with slots that may have been someone else's, and twice as many states."""
    slots = torch.from_numpy(source.choice(NUM_SLOTS, num_rows, replace=False))
    states = [torch.from_numpy(source.integers(0, 99, (2 * num_rows, 4))).float() for _ in "abc"]
    tokens, positions = (torch.from_numpy(source.integers(0, 999, num_rows)) for _ in "ab")
    rows = torch.from_numpy(source.permutation(2 * num_rows)[:num_rows])
    return tokens.to(torch.int32), positions, slots, states, rows


@given(st.lists(st.integers(0, NUM_SLOTS), max_size=12), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_the_cache_ends_up_as_if_every_row_had_been_written_at_once(
    sizes: list[int], seed: int
) -> None:
    source = np.random.default_rng(seed)
    behind, at_once = CacheOfRows(), CacheOfRows()
    for size in sizes:
        step = random_step(source, size)
        for writer in (behind, at_once):
            writer.put(*step)
        for column in step[:3]:
            column.fill_(-7)  # the engine reuses its buffers
        at_once.flush()
        assert at_once.num_waiting == 0
    assert behind.num_waiting == sum(sizes) % CHUNK
    assert len(behind.written) == sum(sizes) // CHUNK
    behind.flush()
    assert np.array_equal(behind.cache, at_once.cache)


def test_a_long_prompt_is_written_in_chunks() -> None:
    writer = CacheOfRows()
    writer.put(*random_step(np.random.default_rng(0), 100))
    rows = 2 * CHUNK + 7
    longer = torch.arange(rows)
    states = [torch.ones(rows, 4)]
    writer.put(longer.to(torch.int32), longer, longer % NUM_SLOTS, states, longer)
    assert writer.num_waiting == 107 and len(writer.written) == 2
    assert max(writer.written) <= CHUNK


def test_nothing_is_written_when_nothing_waits() -> None:
    writer = CacheOfRows()
    writer.flush()
    writer.put(*random_step(np.random.default_rng(0), 0))
    writer.flush()
    assert writer.written == []


@pytest.mark.parametrize(
    ("values", "expected"), [([], []), ([5], [0]), ([3, 1, 3, 2, 1], [4, 3, 2])]
)
def test_last_of_each(values: list[int], expected: list[int]) -> None:
    assert last_of_each(np.array(values, dtype=np.int64)).tolist() == expected
