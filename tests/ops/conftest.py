# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the operator tests."""

from collections.abc import Iterator

import pytest

from vllm_echo import ops

BEST = ops.build_info()["simd"]
LEVELS = ["portable", "avx2", "avx512", "avx512bf16"]


@pytest.fixture(params=LEVELS)
def simd(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test with each instruction set this CPU has."""
    if LEVELS.index(request.param) > LEVELS.index(BEST):
        pytest.skip(f"this CPU stops at {BEST}")
    ops.set_simd_level(request.param)
    assert ops.build_info()["simd"] == request.param
    yield request.param
    ops.set_simd_level(BEST)
