# SPDX-License-Identifier: Apache-2.0
"""Drafting goes on as far as there is room, and no further; and where it does not, the counts and
the log say why."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from tests.heard import heard
from tests.serving import tiny
from tests.serving.harness import Engine, echo_engine, plain_engine, random_prompts, token_ids
from tests.serving.scrape import scrape
from tests.serving.test_identity import expect_identity, greedy
from vllm_echo.integration import silence

NEVER_CUT = {"k_max": 1000, "gates": []}


def note_steps(engine: Engine) -> list[tuple[int, int]]:
    """(root's position, nodes) of every request that decodes in a step, from now on."""
    seen: list[tuple[int, int]] = []
    runner, pack = engine.runner, engine.runner._pack

    def packed(*args) -> None:
        pack(*args)
        decoding = (
            runner.input_batch.num_computed_tokens_cpu >= runner.input_batch.num_prompt_tokens
        )
        roots = runner.step.root_positions.tolist()
        nodes = (runner.step.tree.cu_rows.diff() - 1).tolist()
        seen.extend(
            pair for pair, at in zip(zip(roots, nodes, strict=True), decoding, strict=False) if at
        )

    runner._pack = packed
    return seen


def long_greedy() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)


@pytest.mark.parametrize(
    ("num_nodes", "length", "options"),
    [
        (8, 96, {}),
        (64, 96, {}),
        (64, 160, {"policy": "chain", "max_depth": 12, "target_depth": 12}),
        (255, 96, {}),
        (255, 300, {"max_depth": 12, "top_k": 5}),
    ],
)
def test_trees_go_on_to_the_end_of_the_context(
    target: Path, head: Path, num_nodes: int, length: int, options: dict
) -> None:
    """Catches positions kept free for num_speculative_tokens tokens in a row: of 255 nodes in a
    context of 300 the head drafted for the first 43 positions, and nobody was told."""
    plain = plain_engine(target, max_model_len=length)
    limits = {"max_model_len": length, "max_num_batched_tokens": 4096, "max_num_seqs": 12}
    echo = echo_engine(target, head, num_nodes, NEVER_CUT | options, **limits)
    prompts = random_prompts(12, seed=num_nodes, shortest=length - 70, longest=length - 40)
    seen = note_steps(echo)
    if options.get("policy") == "chain":
        expected = plain.generate(prompts, [long_greedy()] * 12)
        echo.follow({tuple(o.prompt_token_ids): list(o.outputs[0].token_ids) for o in expected})
        assert token_ids(echo.generate(prompts, [long_greedy()] * 12)) == token_ids(expected)
        assert echo.record.accepted > 100
    else:
        expected, _ = expect_identity(plain, echo, [long_greedy()] * 12, prompts=prompts)
    assert {
        len(p) + len(o.outputs[0].token_ids) for p, o in zip(prompts, expected, strict=True)
    } == {length}
    # A node behind the root, and the token that its acceptance brings: three positions.
    assert all(bool(nodes) == (root <= length - 3) for root, nodes in seen), seen
    assert max(root for root, nodes in seen if nodes) == length - 3


def test_a_head_with_a_shorter_context_stops_drafting_alone(
    plain: Engine, target: Path, head: Path
) -> None:
    """Requests that cross the head's context decode on without drafts; the others keep theirs."""
    options = {"speculative": {"max_model_len": 96}, "disable_log_stats": False}
    echo = echo_engine(target, head, 8, NEVER_CUT, max_num_batched_tokens=4096, **options)
    prompts = [random_prompts(1, n, shortest=n, longest=n)[0] for n in range(90, 101)]
    prompts += random_prompts(8, seed=41, shortest=80, longest=130)
    prompts += random_prompts(8, seed=42, shortest=5, longest=30)
    seen = note_steps(echo)
    expect_identity(plain, echo, [greedy()] * len(prompts), prompts=prompts)
    # The head looks at the position before the root, 95 at last.
    drafted_at = {root for root, nodes in seen if nodes}
    assert max(drafted_at) == 96 and drafted_at >= {40, *range(90, 97)}
    beyond = sum(root > 96 for root, _ in seen)
    # A request's last step is counted as such.
    assert 100 < beyond - len(prompts) <= scrape().left_out()["head_context"] <= beyond


def note_waits(engine: Engine) -> tuple[list[int], list[int]]:
    """For every step: requests that ran and got no row, and rows that prompts got."""
    waits: list[int] = []
    rows: list[int] = []
    schedule = engine.scheduler.schedule

    def scheduled(*args, **kwargs):
        running = [request.request_id for request in engine.scheduler.running]
        output = schedule(*args, **kwargs)
        waits.append(sum(name not in output.num_scheduled_tokens for name in running))
        rows.append(output.total_num_scheduled_tokens)
        return output

    engine.scheduler.schedule = scheduled
    return waits, rows


@pytest.mark.parametrize("policy", ["echo", "static"])
def test_a_constant_budget_starves_nobody(
    plain: Engine, target: Path, head: Path, policy: str
) -> None:
    """Every request advances in every step. Catches nodes of the first that take the rows of the
    last: those waited for 21 steps on end, and all together took 89."""
    limits = {"max_num_batched_tokens": 40, "max_num_seqs": 16}
    echo = echo_engine(target, head, 8, {"policy": policy, "k_max": 1000, "gates": []}, **limits)
    prompts = random_prompts(16, seed=71, shortest=3, longest=6)
    waits, rows = note_waits(echo)
    expect_identity(plain, echo, [greedy()] * 16, prompts=prompts)
    assert sum(waits) == 0, waits
    assert max(rows) == 40, "the budget was never that large"
    assert len(waits) < 40


def test_prompts_are_let_in_beside_a_constant_budget(
    plain: Engine, target: Path, head: Path
) -> None:
    """While there is a free seat a budget without end leaves half of the rows to who waits."""
    limits = {"max_num_batched_tokens": 40, "max_num_seqs": 32}
    echo = echo_engine(target, head, 8, NEVER_CUT, **limits)
    engine = echo.llm.llm_engine
    waits, _ = note_waits(echo)
    for index, prompt in enumerate(random_prompts(16, seed=73, shortest=3, longest=6)):
        engine.add_request(f"r{index}", {"prompt_token_ids": prompt}, long_greedy())
    for _ in range(12):
        engine.step()
    late = random_prompts(1, seed=74, shortest=48, longest=48)[0]
    engine.add_request("late", {"prompt_token_ids": late}, greedy())
    steps, got = 0, 0
    while not got:
        steps += 1
        got = sum(len(o.outputs[0].token_ids) for o in engine.step() if o.request_id == "late")
    assert steps <= 4, "48 rows, twelve a step"
    assert sum(waits) == 0
    assert echo.record.drafted > 12 * 8
    engine.abort_request([f"r{index}" for index in range(16)] + ["late"])


def damaged(head: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of the head with other tensors."""
    folder.mkdir()
    (folder / "config.json").write_text((head / "config.json").read_text())
    tensors = load_file(head / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_head_that_gives_no_numbers_is_counted_and_said(
    plain: Engine, target: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in `fc`: the output is right, the head runs in vain in every step, and nobody knew."""
    monkeypatch.setattr(silence, "PATIENCE", 15)
    broken = damaged(head, tmp_path / "fc", lambda tensors: tensors["fc.weight"].fill_(torch.nan))
    prompts = random_prompts(8, seed=81)
    echo = echo_engine(target, broken, 8, NEVER_CUT, disable_log_stats=False)
    with heard(silence.logger.name, logging.INFO) as lines:
        outputs = echo.generate(prompts, [greedy()] * 8)
        echo.generate(prompts, [greedy()] * 8)
    assert token_ids(outputs) == token_ids(plain.generate(prompts, [greedy()] * 8))
    assert scrape().nodes("drafted") == {}
    assert scrape().left_out()["no_score"] == 2 * 8 * 22, "all but each request's last two steps"
    assert len(lines) == 1 and "the head's logits are no numbers (NaN)" in lines[0]


def test_a_token_without_numbers_costs_its_own_requests_their_drafts(
    plain: Engine, target: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "PATIENCE", 5)
    prompts = [[11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 7, 34]]

    def own_embedding(tensors: dict[str, torch.Tensor]) -> None:
        gen = torch.Generator().manual_seed(3)
        tensors["embed_tokens.weight"] = torch.randn(tiny.VOCAB, tiny.HIDDEN, generator=gen)
        tensors["embed_tokens.weight"][7] = torch.nan

    broken = damaged(head, tmp_path / "embedding", own_embedding)
    echo = echo_engine(target, broken, 8, NEVER_CUT, disable_log_stats=False)
    never_7 = [greedy(logit_bias={7: -100.0})] * 3
    with heard(silence.logger.name, logging.INFO) as lines:
        outputs = echo.generate(prompts, never_7)
    assert token_ids(outputs) == token_ids(plain.generate(prompts, never_7))
    metrics = scrape()
    steps = metrics.steps("with")
    assert metrics.left_out()["no_score"] == pytest.approx(steps, abs=2), "one request of three"
    assert metrics.nodes("drafted")[1] == pytest.approx(2 * 3 * steps, abs=12)
    assert lines == []
