# SPDX-License-Identifier: Apache-2.0
"""Sessions: a request whose prompt grows while it runs (streaming input).

vLLM ends a chunk's answer as it ends any request, keeps what is computed of it, drops the last
token, and goes on with the next chunk. So whatever a path leaves behind an end is there for
everybody to see: in the session's next answer, and in the prefix cache.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from vllm import AsyncEngineArgs, SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from tests.serving.harness import (
    ENGINE_DEFAULTS,
    AcceptanceRecord,
    Engine,
    echo_engine,
    follow,
    plain_engine,
    random_prompts,
    speculative_config,
    token_ids,
    truths_of,
    watch,
)

TOKENS_AFTER = 12
FIRST_ENDS = range(2, 16)


@pytest.fixture(scope="module")
def plain(target: Path) -> Engine:
    return plain_engine(target, max_num_batched_tokens=16384, enable_prefix_caching=True)


@pytest.fixture(scope="module")
def echo(target: Path, head: Path) -> Engine:
    """A budget for everybody's whole tree: paths are as long as the oracle makes them."""
    return echo_engine(target, head, 8, {"k_max": 256, "gates": []}, enable_prefix_caching=True)


@dataclass
class Session:
    """Chunks of a growing prompt, each with its options, and what was answered."""

    chunks: list[tuple[list[int], SamplingParams]]
    answers: list[list[int]] = field(default_factory=list)

    def prompt(self, chunk: int) -> tuple[int, ...]:
        """What the engine takes for the prompt of ``chunk``: all that it has computed before."""
        prompt: list[int] = []
        for place, (tokens, _) in enumerate(self.chunks[: chunk + 1]):
            prompt += tokens
            if place < chunk:
                prompt += self.answers[place][:-1]
        return tuple(prompt)


def talk(engine: Engine, sessions: Sequence[Session], at_once: bool) -> None:
    """Let all sessions run side by side, sending what ``AsyncLLM.generate`` sends for a generator
    of ``StreamingInput``: every chunk ``at_once``, or each when the one before is answered."""
    core, waiting = engine.llm.llm_engine, {}
    for index, session in enumerate(sessions):
        session.answers = [[]]
        waiting[str(index)] = [
            make_request(engine, str(index), tokens, params) for tokens, params in session.chunks
        ] + [make_request(engine, str(index), [0], session.chunks[0][1], resumable=False)]
    for requests in waiting.values():
        send(engine, requests, len(requests) if at_once else 1)
    while waiting:
        for output in core.step():
            requests, session = waiting[output.request_id], sessions[int(output.request_id)]
            (sample,) = output.outputs
            session.answers[-1] += sample.token_ids
            if sample.finish_reason is None:
                continue
            if len(session.answers) == len(session.chunks):
                waiting.pop(output.request_id)
            else:
                session.answers.append([])
            send(engine, requests, 1)
    assert not core.has_unfinished_requests()


def make_request(
    engine: Engine, name: str, tokens: list[int], params: SamplingParams, resumable: bool = True
):
    core = engine.llm.llm_engine
    request = core.input_processor.process_inputs(
        name,
        {"type": "token", "prompt_token_ids": list(tokens)},
        params,
        supported_tasks=core.get_supported_tasks(),
        resumable=resumable,
    )
    request.external_req_id = name
    return request


def send(engine: Engine, requests: list, count: int) -> None:
    core = engine.llm.llm_engine
    for request in requests[:count]:
        # Front-end and engine extend the prompt each for itself; in one process they share it.
        mine = copy(request)
        mine.prompt_token_ids = list(request.prompt_token_ids)
        core.output_processor.add_request(mine, None, None, 0)
        core.engine_core.add_request(request)
    del requests[:count]


def options(seed: int | None, **more) -> SamplingParams:
    """Greedy, or with a seed: which a session keeps from chunk to chunk, and its stream with it."""
    sampling = {"temperature": 0} if seed is None else {"temperature": 1.0, "seed": seed}
    return SamplingParams(**sampling, output_kind=RequestOutputKind.DELTA, ignore_eos=True, **more)


def sessions_that_stop_inside_a_path(
    plain: Engine, sampled: bool, num_more: int
) -> tuple[list[Session], dict]:
    """One session for each length of the first answer, and what comes behind every stop."""
    prompts = random_prompts(len(FIRST_ENDS), seed=61, shortest=20, longest=20)
    seeds = [index if sampled else None for index in range(len(prompts))]
    onward = plain.generate(prompts, [options(seed, max_tokens=40) for seed in seeds])
    sessions = []
    for index, (length, output) in enumerate(zip(FIRST_ENDS, onward, strict=True)):
        stop = output.outputs[0].token_ids[length - 1]
        more = random_prompts(1, seed=70 + index, shortest=num_more, longest=num_more)[0]
        first = options(seeds[index], max_tokens=40, stop_token_ids=[stop])
        second = options(seeds[index], max_tokens=TOKENS_AFTER)
        sessions.append(Session([(prompts[index], first), (more, second)]))
    return sessions, truths_of(onward)


def copies(sessions: list[Session]) -> list[Session]:
    return [Session(session.chunks) for session in sessions]


def expect_same_talk(
    plain: Engine, echo: Engine, expected: list[Session], truths: dict, at_once: bool
) -> None:
    actual = copies(expected)
    talk(plain, expected, at_once)
    chunks = [(s, place) for s in expected for place in range(1, len(s.chunks))]
    later = {session.prompt(place): session.answers[place] for session, place in chunks}
    echo.follow(truths | later, hit_rate=1.0)
    echo.record.clear()
    free = echo.num_free_blocks()
    talk(echo, actual, at_once)
    assert [s.answers for s in actual] == [s.answers for s in expected]
    echo.record.require_tree_acceptance()
    assert echo.num_free_blocks() == free


@pytest.mark.parametrize("at_once", [True, False], ids=["at_once", "one_by_one"])
@pytest.mark.parametrize("num_more", [7, 1])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
def test_a_stop_inside_a_path_ends_a_chunks_answer(
    plain: Engine, echo: Engine, sampled: bool, num_more: int, at_once: bool
) -> None:
    """Catches a path that leads on behind its stop: the next chunk's first tokens were taken as
    computed, a chunk of one token ended the engine, and a seeded stream had run ahead."""
    sessions, truths = sessions_that_stop_inside_a_path(plain, sampled, num_more)
    expect_same_talk(plain, echo, sessions, truths, at_once)


def test_what_a_session_leaves_in_the_prefix_cache_is_right(plain: Engine, echo: Engine) -> None:
    """Catches blocks that hold the KV of dropped drafts: everybody's who sends the same text."""
    sessions, truths = sessions_that_stop_inside_a_path(plain, sampled=False, num_more=50)
    expect_same_talk(plain, echo, sessions, truths, at_once=True)
    prompts = [[*session.prompt(1), *session.answers[1]] for session in sessions]
    params = [options(None, max_tokens=TOKENS_AFTER)] * len(prompts)
    expected, actual = plain.generate(prompts, params), echo.generate(prompts, params)
    assert token_ids(actual) == token_ids(expected)
    assert sum(output.num_cached_tokens for output in actual) > 0


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
def test_every_other_end_of_an_answer_ends_the_path(
    plain: Engine, echo: Engine, sampled: bool
) -> None:
    """A repetition or max_tokens in two chunks, then the context limit."""
    count = 12
    endless = {"max_tokens": 40, "logit_bias": {7: 100.0}}
    ends = [
        {**endless, "repetition_detection": RepetitionDetectionParams(2, 1, 4), "min_tokens": 6},
        {**endless, "repetition_detection": RepetitionDetectionParams(1, 1, 5)},
        {"max_tokens": 9},
    ]
    seeds = [index if sampled else None for index in range(count)]
    prompts = random_prompts(count, seed=81, shortest=20, longest=20)
    onward = plain.generate(
        prompts,
        [
            options(s, **({"max_tokens": 40} if i % 3 == 2 else endless))
            for i, s in enumerate(seeds)
        ],
    )
    more = random_prompts(count, seed=82, shortest=7, longest=7)
    rest = random_prompts(count, seed=83, shortest=440, longest=440)
    sessions = []
    for index, seed in enumerate(seeds):
        short, long = options(seed, **ends[index % 3]), options(seed, max_tokens=200)
        chunks = [(prompts[index], short), (more[index], short), (rest[index], long)]
        sessions.append(Session(chunks))
    expect_same_talk(plain, echo, sessions, truths_of(onward), at_once=False)
    lengths = [[len(answer) for answer in session.answers] for session in sessions]
    assert {tuple(two) for *two, _ in lengths} == {(6, 6), (5, 5), (9, 9)}
    for session, (*_, last) in zip(sessions, lengths, strict=True):
        assert len(session.prompt(2)) + last == ENGINE_DEFAULTS["max_model_len"]


def test_sessions_of_a_server_in_processes_of_its_own(
    plain: Engine, target: Path, head: Path
) -> None:
    """The same through ``AsyncLLM.generate``, where chunks arrive when they arrive."""
    sessions, truths = sessions_that_stop_inside_a_path(plain, sampled=True, num_more=3)
    talk(plain, sessions, at_once=True)
    truths |= {session.prompt(1): session.answers[1] for session in sessions}
    arguments = AsyncEngineArgs(
        model=str(target),
        speculative_config=speculative_config(head, 8, {"k_max": 256, "gates": []}),
        **ENGINE_DEFAULTS,
    )
    answers, accepted = asyncio.run(answer(arguments, copies(sessions), truths))
    assert answers == [session.answers for session in sessions]
    assert accepted > 0


async def answer(
    arguments: AsyncEngineArgs, sessions: list[Session], truths: dict
) -> tuple[list[list[list[int]]], int]:
    """What ``AsyncLLM`` answers to every session, and the number of nodes it accepted."""
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        await engine.collective_rpc(start_oracle, args=(truths,))

        async def one(index: int, session: Session) -> list[list[int]]:
            answers: list[list[int]] = [[]]
            stream = engine.generate(chunks(session), session.chunks[0][1], str(index))
            async for output in stream:
                answers[-1] += output.outputs[0].token_ids
                if output.outputs[0].finish_reason and len(answers) < len(session.chunks):
                    answers.append([])
            return answers

        answers = await asyncio.gather(*(one(i, s) for i, s in enumerate(sessions)))
        (accepted,) = await engine.collective_rpc(count_accepted)
        return list(answers), accepted
    finally:
        engine.shutdown()


async def chunks(session: Session) -> AsyncIterator[StreamingInput]:
    for tokens, params in session.chunks:
        yield StreamingInput({"type": "token", "prompt_token_ids": tokens}, params)


def start_oracle(worker, truths: dict) -> None:
    """In the worker's process."""
    runner = worker.model_runner
    follow(runner, truths, hit_rate=1.0)
    runner.record = AcceptanceRecord()
    watch(runner.rejection_sampler, runner.record)


def count_accepted(worker) -> int:
    return worker.model_runner.record.accepted
