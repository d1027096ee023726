# SPDX-License-Identifier: Apache-2.0
"""Trees of every awkward size and shape, through the real engine."""

from pathlib import Path

import pytest

from tests.serving.harness import Engine, echo_engine, random_prompts, token_ids, truths_of
from tests.serving.test_identity import expect_identity, greedy, seeded

NO_GATES: list = []


@pytest.mark.parametrize("num_nodes", [1, 2, 31, 32, 33, 63, 64, 65, 130])
def test_trees_around_word_and_block_boundaries(
    plain: Engine, target: Path, head: Path, num_nodes: int
) -> None:
    depth = min(8, num_nodes)
    echo = echo_engine(
        target,
        head,
        num_nodes,
        {
            "k_max": 4 * num_nodes,
            "max_depth": depth,
            "target_depth": depth,
            "top_k": 12,
            "gates": NO_GATES,
        },
        max_num_seqs=4,
        max_num_batched_tokens=2048,
    )
    prompts = random_prompts(8, seed=num_nodes)
    params = [greedy() if i % 2 else seeded(i) for i in range(8)]
    if num_nodes > 1:
        expect_identity(plain, echo, params, prompts=prompts)
    else:
        expect_single_nodes(plain, echo, params, prompts)
    assert echo.record.largest_tree == num_nodes


def expect_single_nodes(plain: Engine, echo: Engine, params: list, prompts: list) -> None:
    """One node has no sibling and moves nothing: identity and acceptance only."""
    expected = plain.generate(prompts, params)
    echo.follow(truths_of(expected))
    echo.record.clear()
    assert token_ids(echo.generate(prompts, params)) == token_ids(expected)
    assert echo.record.accepted > 0


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 16])
def test_depth_one_of_any_width(plain: Engine, target: Path, head: Path, width: int) -> None:
    """A single layer: no draft forward beyond the roots'."""
    config = {"max_depth": 1, "target_depth": 1, "top_k": width, "k_max": 64, "gates": NO_GATES}
    echo = echo_engine(target, head, width, config, max_num_seqs=4)
    params, prompts = [greedy()] * 8, random_prompts(8, seed=width)
    if width > 1:
        expect_identity(plain, echo, params, prompts=prompts)
    else:
        expect_single_nodes(plain, echo, params, prompts)
    assert echo.record.largest_tree == width


def test_gates_that_nothing_passes_and_no_width_leave_plain_decoding(
    plain: Engine, target: Path, head: Path
) -> None:
    """Root only, most of the time: three nodes of budget for sixteen requests."""
    echo = echo_engine(
        target, head, 4, {"k_max": 3, "gates": [{"depth": 0, "threshold": 1.0}]}, max_num_seqs=16
    )
    expected = plain.generate(random_prompts(16), [greedy()] * 16)
    echo.follow(truths_of(expected))
    echo.record.clear()
    assert token_ids(echo.generate(random_prompts(16), [greedy()] * 16)) == token_ids(expected)
    assert 0 < echo.record.largest_step <= 3
    assert echo.record.accepted > 0


def test_a_tree_of_width_one_is_the_chain(plain: Engine, target: Path, head: Path) -> None:
    """Same drafts, same acceptance, same steps: token for token and node for node."""
    wide = {"k_max": 64, "max_depth": 4, "target_depth": 4, "gates": NO_GATES}
    prompts, params = random_prompts(8), [greedy()] * 8
    expected = plain.generate(prompts, params)
    records = []
    for echo_options in ({**wide, "top_k": 1}, {**wide, "policy": "chain"}):
        engine = echo_engine(target, head, 4, echo_options, max_num_seqs=8)
        engine.follow(truths_of(expected))
        outputs = token_ids(engine.generate(prompts, params))
        records.append((outputs, engine.record))
    assert records[0] == records[1]
    assert records[0][0] == token_ids(expected)
    assert records[0][1].accepted > 0


@pytest.mark.parametrize("policy", ["echo", "static", "chain"])
@pytest.mark.parametrize("k_max", [5, 24])
def test_no_policy_ever_exceeds_the_budget(
    plain: Engine, target: Path, head: Path, policy: str, k_max: int
) -> None:
    echo = echo_engine(
        target,
        head,
        8,
        {"policy": policy, "k_max": k_max, "gates": NO_GATES}
        if policy == "echo"
        else {"policy": policy, "k_max": k_max},
        max_num_seqs=16,
    )
    expected = plain.generate(random_prompts(16), [greedy()] * 16)
    echo.follow(truths_of(expected))
    echo.record.clear()
    assert token_ids(echo.generate(random_prompts(16), [greedy()] * 16)) == token_ids(expected)
    assert echo.record.largest_step == k_max
    assert echo.record.accepted > 0
