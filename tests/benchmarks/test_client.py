# SPDX-License-Identifier: Apache-2.0
"""The client against a stand-in server, and its sums against worked examples."""

import asyncio
import json
from itertools import count
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.serving import client
from benchmarks.serving.errors import BenchmarkError
from tests.benchmarks.kit import chat_app


def run(answer, load: client.Load) -> tuple[float, list[client.Answer]]:
    async def whole() -> tuple[float, list[client.Answer]]:
        async with TestServer(chat_app(answer)) as server:
            return await client._send_all(str(server.make_url("")).rstrip("/"), "m", load)

    return asyncio.run(whole())


def load_of(count: int, concurrency: int, temperature: float = 0.0) -> client.Load:
    """Nothing comes after those that are waited for."""
    return client.Load([f"q{i}" for i in range(count)], count, concurrency, 8, temperature, 100)


class Recorder:
    """Answers with three chunks of two tokens each, and keeps what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.running = self.most = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.running += 1
        self.most = max(self.most, self.running)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for step in range(3):
                await asyncio.sleep(0.01)
                usage = {"prompt_tokens": 5, "completion_tokens": 2 * step + 2}
                delta = {"choices": [{"delta": {"content": "x"}}], "usage": usage}
                await self._event(response, delta)
            await asyncio.sleep(0.05)
            await self._event(response, {"choices": [], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.running -= 1
        return response

    @staticmethod
    async def _event(response: web.StreamResponse, body: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(body).encode() + b"\n\n")


def test_all_prompts_are_sent_once_and_never_more_than_wanted_at_a_time():
    server = Recorder()
    _, answers = run(server.answer, load_of(7, concurrency=3))
    questions = [body["messages"][0]["content"] for body in server.bodies]
    assert sorted(questions) == [f"q{i}" for i in range(7)]
    assert server.most == 3
    assert len(answers) == 7


class LongAndShort(Recorder):
    """One token every 10 ms; request q0 has 40 of them, the others 4. Keeps how many ran beside
    each token of q0."""

    def __init__(self) -> None:
        super().__init__()
        self.beside: list[int] = []
        self.broken_off = self.sent = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        first = body["messages"][0]["content"] == "q0"
        self.running += 1
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for step in range(40 if first else 4):
                await asyncio.sleep(0.01)
                usage = {"prompt_tokens": 5, "completion_tokens": step + 1}
                await self._event(response, {"choices": [{"delta": {}}], "usage": usage})
                self.sent += 1
                if first:
                    self.beside.append(self.running)
            await self._event(response, {"choices": [], "usage": usage})
        except ConnectionResetError:
            self.broken_off += 1
        finally:
            self.running -= 1
        return response


def test_the_load_is_held_until_the_last_one_that_is_waited_for():
    """Catches a measurement whose end runs at a lower load than it is named after, which flatters
    what is fast there."""
    server = LongAndShort()
    load = client.Load((f"q{i}" for i in count()), 4, 3, 8, 0.0, 100)
    seconds, answers = run(server.answer, load)
    assert answers[0].complete and answers[0].output_tokens == 40
    # A slot is empty for the moment between an answer and the next question only.
    assert sum(running == 3 for running in server.beside[2:]) > 25
    assert len(answers) > 10  # six are in progress or done beside each ten tokens of q0
    summary = client.summarise(seconds, answers, load.requests)
    assert summary["requests"] == 4
    assert summary["output_tokens"] == 40 + 3 * 4
    assert summary["tokens"] == sum(answer.output_tokens for answer in answers) > 80
    assert summary["tokens_per_second"] == pytest.approx(summary["tokens"] / seconds)
    assert len(summary["every_e2e_ms"]) == 4
    assert server.sent - 3 <= summary["tokens"] <= server.sent


def test_nobody_waits_for_what_only_held_the_load():
    server = LongAndShort()
    # Sixth of all, so that it is asked for while the last of the four runs; it has 40 tokens.
    names = ["q1", "q2", "q3", "q4", "q5", "q0"]
    seconds, answers = run(server.answer, client.Load(names, 4, 2, 8, 0.0, 100))
    assert [answer.complete for answer in answers[:4]] == [True] * 4
    assert seconds < 0.3
    assert not answers[-1].complete


def test_answers_differ_in_length_and_by_nothing_but_their_number():
    """Catches a load that plain decoding answers in lockstep, and one that differs from engine to
    engine: the limits are those of the requests, whichever slot sends them."""
    server = Recorder()
    run(server.answer, load_of(7, concurrency=3))
    limits = {body["messages"][0]["content"]: body["max_tokens"] for body in server.bodies}
    assert limits == {f"q{i}": client.output_limit(8, 100 + i) for i in range(7)}
    many = [client.output_limit(128, number) for number in range(500)]
    assert min(many) == 64 and max(many) == 192
    assert sum(many) / len(many) == pytest.approx(128, abs=1)
    assert all(len(set(many[i : i + 8])) == 8 for i in range(400))
    assert client.output_limit(1, 0) == 1


def test_times_end_with_the_last_token_not_with_the_usage():
    _, (answer,) = run(Recorder().answer, load_of(1, 1))
    assert (answer.prompt_tokens, answer.output_tokens) == (5, 6)
    assert 0.01 <= answer.ttft < answer.e2e
    assert len(answer.itl) == 2
    assert answer.e2e == pytest.approx(answer.ttft + sum(answer.itl))
    assert answer.tpot == pytest.approx(sum(answer.itl) / 5)
    assert answer.e2e < 0.08


def test_seeds_count_on_and_only_where_something_is_sampled():
    server = Recorder()
    run(server.answer, load_of(3, 3, temperature=1.0))
    assert sorted(body["seed"] for body in server.bodies) == [100, 101, 102]
    server = Recorder()
    run(server.answer, load_of(1, 1))
    assert "seed" not in server.bodies[0]


async def _refuse(request: web.Request) -> web.Response:
    return web.json_response({"message": "too long"}, status=400)


async def _break_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    await Recorder._event(response, {"choices": [{"delta": {}}], "usage": usage})
    assert request.transport is not None
    request.transport.close()
    return response


def test_a_refusal_is_shown():
    with pytest.raises(BenchmarkError, match="400.*too long"):
        run(_refuse, load_of(2, 2))


def test_a_broken_connection_is_told_apart():
    with pytest.raises(ConnectionError):
        run(_break_off, load_of(2, 2))


def test_sums():
    answers = [
        client.Answer(
            ttft=0.1, e2e=1.1, itl=[0.5, 0.5], prompt_tokens=3, output_tokens=11, complete=True
        ),
        client.Answer(ttft=0.3, e2e=0.3, itl=[], prompt_tokens=4, output_tokens=1, complete=True),
        client.Answer(
            ttft=0.2, e2e=1.2, itl=[1.0], prompt_tokens=5, output_tokens=3, complete=True
        ),
    ]
    held = client.Answer(ttft=0.7, e2e=0.9, itl=[0.2], prompt_tokens=6, output_tokens=5)
    summary = client.summarise(2.0, [*answers, held], requests=3)
    assert summary["tokens_per_second"] == 10
    assert (summary["requests"], summary["output_tokens"]) == (3, 15)
    assert summary["prompt_tokens"] == 18
    assert summary["ttft_ms"]["p50"] == pytest.approx(200)
    assert summary["every_tpot_ms"] == [100.0, 500.0]  # none of an answer of one token
    assert summary["tpot_ms"]["mean"] == pytest.approx(300)
    assert summary["e2e_ms"]["p99"] == pytest.approx(1200 - 0.02 * 100)
    assert summary["itl_ms"]["p50"] == pytest.approx(500)
    assert client.distribution([]) is None


def test_a_load_of_so_many_seconds_ends_then_and_counts_what_has_arrived():
    server = LongAndShort()
    load = client.Load((f"q{i}" for i in count()), 1000, 3, 8, 0.0, 100, seconds=0.2)
    seconds, answers = run(server.answer, load)
    assert seconds == pytest.approx(0.2, abs=0.1)
    summary = client.summarise(seconds, answers, load.requests)
    assert 0 < summary["requests"] < len(answers), "only whole answers have latencies"
    assert summary["tokens"] == sum(answer.output_tokens for answer in answers) > 10
