# SPDX-License-Identifier: Apache-2.0
"""Engines over the tiny pair, one of each per module."""

from pathlib import Path

import pytest

from tests.serving.harness import Engine, echo_engine, plain_engine


@pytest.fixture(scope="module")
def plain(target: Path) -> Engine:
    """Decoding without speculation, the reference of every identity test."""
    # All prompts of a test in one prefill: stock vLLM dies of a seeded request in chunks.
    return plain_engine(target, max_num_batched_tokens=16384)


@pytest.fixture(scope="module")
def echo(target: Path, head: Path) -> Engine:
    """Echo with default gates and a budget that a full batch exceeds."""
    return echo_engine(target, head, max_num_batched_tokens=4096)
