# SPDX-License-Identifier: Apache-2.0
"""A server that drafts for nobody says why, once, and only when it goes on for long."""

import logging
from collections.abc import Iterator

import pytest

from tests.heard import heard
from vllm_echo.core.stats import StepStats, Undrafted
from vllm_echo.integration import silence
from vllm_echo.integration.silence import PASSING, PATIENCE, REASONS, Silence


@pytest.fixture
def lines() -> Iterator[list[str]]:
    with heard(silence.logger.name, logging.INFO) as texts:
        yield texts


def left_out(reason: Undrafted, count: int = 1) -> StepStats:
    return StepStats(undrafted=[0] * reason + [count])


DRAFTED = StepStats(drafted=[3], undrafted=[0, 0, 1])


@pytest.mark.parametrize("reason", [r for r in Undrafted if r not in PASSING], ids=str)
def test_every_reason_that_lasts_is_said_once(reason: Undrafted, lines: list[str]) -> None:
    seen = Silence(speaks=True)
    for _ in range(PATIENCE - 1):
        seen.see(left_out(reason))
    assert lines == []
    for _ in range(3 * PATIENCE):
        seen.see(left_out(reason))
    assert lines == [f"ECHO has drafted for nobody in {PATIENCE} steps: {REASONS[reason][1]}"]


def test_a_request_that_is_drafted_for_ends_the_silence(lines: list[str]) -> None:
    seen = Silence(speaks=True)
    for step in range(5 * PATIENCE):
        seen.see(left_out(Undrafted.NO_GAIN) if step % 100 else DRAFTED)
    assert lines == []


def test_prompts_and_last_tokens_are_no_silence(lines: list[str]) -> None:
    seen = Silence(speaks=True)
    for step in range(4 * PATIENCE):
        seen.see(left_out(PASSING[step % 2]))
        seen.see(StepStats())
    assert lines == []


def test_the_chief_reason_is_said_and_another_one_later(lines: list[str]) -> None:
    seen = Silence(speaks=True)
    for reason, count in ((Undrafted.THINKING_BUDGET, 3), (Undrafted.NO_GAIN, 9)):
        for step in range(PATIENCE):
            seen.see(left_out(reason, count) if step % 2 else left_out(Undrafted.HEAD_CONTEXT))
    assert [REASONS[Undrafted.THINKING_BUDGET][1] in lines[0], len(lines)] == [True, 2]
    assert REASONS[Undrafted.NO_GAIN][1] in lines[1]


def test_one_rank_speaks(lines: list[str]) -> None:
    seen = Silence(speaks=False)
    for _ in range(3 * PATIENCE):
        seen.see(left_out(Undrafted.NO_SCORE))
    assert lines == []
