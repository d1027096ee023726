# SPDX-License-Identifier: Apache-2.0
"""A client that keeps a number of streaming chat requests running, and times them.

The load is held: until the last of the requests that are waited for is answered, every slot that
becomes free sends another one, and what still runs then is broken off. Without that, a third of a
measurement's time (two requests a slot) is its end, in which ever fewer run and speculation is at
its best. Throughput is every token that arrived from the first request on, prompts' time
included, over that time; latencies are those of the requests that are waited for, which differ from
engine to engine in nothing.

Otherwise definitions are those of `vllm bench serve`: TTFT up to the first chunk with a choice, E2E
up to the last one, TPOT = (E2E - TTFT) / (tokens - 1), ITL between chunks. It is not used itself
because importing vLLM takes ten seconds and half a gigabyte, which is more than a measurement may
cost.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import numpy as np

from benchmarks.serving.errors import BenchmarkError

PERCENTILES = (50, 90, 99)
GOLDEN = 0.6180339887498949
LONGEST = 1.5
"""Most tokens of the longest answers over the mean."""


@dataclass(frozen=True)
class Load:
    """What a client sends."""

    prompts: Iterable[str]
    """May be endless; where it is not, the load falls at its end."""
    requests: int
    """So many are waited for; those after them keep the load."""
    concurrency: int
    output_tokens: int
    """Most tokens of an answer, on average: see ``output_limit``."""
    temperature: float
    seed: int
    """Of the first request; the others count on."""
    seconds: float | None = None
    """Ends then, whatever is answered."""


@dataclass
class Answer:
    """One request's times, in seconds."""

    ttft: float = 0.0
    e2e: float = 0.0
    itl: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    """So far, or of the whole answer."""
    complete: bool = False

    @property
    def tpot(self) -> float | None:
        """None for an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)


def send(url: str, model: str, load: Load) -> dict[str, Any]:
    """Hold ``load`` until all requests that are waited for are answered, or its time is over, and
    sum up."""
    seconds, answers = asyncio.run(_send_all(url, model, load))
    return summarise(seconds, answers, load.requests)


def output_limit(mean: int, number: int) -> int:
    """Most tokens of the answer to request ``number``: spread evenly from half of ``mean`` to one
    and a half of it. With one limit for all, plain decoding answers every slot in lockstep, which
    no traffic does: it never has a slot that ends later than others, and speculation has."""
    return max(1, round(mean * (LONGEST - 1 + GOLDEN * number % 1)))


@dataclass
class _Run:
    """What the slots share."""

    session: aiohttp.ClientSession
    url: str
    model: str
    load: Load
    waiting: Iterator[tuple[int, str]]
    answers: list[Answer] = field(default_factory=list)
    """In the order in which they were asked for."""
    num_answered: int = 0
    """Of those that are waited for."""
    done: asyncio.Event = field(default_factory=asyncio.Event)


async def _send_all(url: str, model: str, load: Load) -> tuple[float, list[Answer]]:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        run = _Run(session, url, model, load, enumerate(load.prompts))
        start = time.perf_counter()
        slots = [asyncio.create_task(_slot(run)) for _ in range(load.concurrency)]
        everything = asyncio.gather(*slots)
        done = asyncio.create_task(run.done.wait())
        either: list[asyncio.Future[Any]] = [everything, done]
        try:
            await asyncio.wait(either, timeout=load.seconds, return_when=asyncio.FIRST_COMPLETED)
            seconds = time.perf_counter() - start
            # What is broken off counts with the tokens that it has by now.
            answers = [replace(answer) for answer in run.answers]
        finally:
            for task in (*slots, done):
                task.cancel()
            results = await asyncio.gather(*slots, return_exceptions=True)
            await asyncio.gather(*either, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):  # a cancelled slot's is none
                raise result
        return seconds, answers


async def _slot(run: _Run) -> None:
    """One request after the other, as long as there are any."""
    load = run.load
    for number, prompt in run.waiting:
        body = {
            "model": run.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": output_limit(load.output_tokens, load.seed + number),
            "temperature": load.temperature,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if load.temperature > 0:
            body["seed"] = load.seed + number
        answer = Answer()
        run.answers.append(answer)
        await _ask(run, body, answer)
        run.num_answered += number < load.requests
        if run.num_answered == load.requests:
            run.done.set()
            return


async def _ask(run: _Run, body: dict[str, Any], answer: Answer) -> None:
    start = last = time.perf_counter()
    try:
        async with run.session.post(f"{run.url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                text = (await response.text()).strip()
                raise BenchmarkError(f"the server answered {response.status}: {text[:500]}")
            async for chunk in _chunks(response):
                now = time.perf_counter()
                if "error" in chunk:
                    raise BenchmarkError(f"the server answered {chunk['error']}")
                if usage := chunk.get("usage"):
                    answer.prompt_tokens = usage["prompt_tokens"]
                    answer.output_tokens = usage["completion_tokens"]
                if not chunk.get("choices"):
                    answer.complete = True  # the last chunk has the usage only
                    continue
                if answer.ttft == 0.0:
                    answer.ttft = now - start
                else:
                    answer.itl.append(now - last)
                last = now
                answer.e2e = last - start
    except aiohttp.ClientError as error:
        raise ConnectionError(f"the server stopped answering: {error}") from None
    if not answer.complete:
        raise ConnectionError("the server ended an answer before it was complete")


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events."""
    async for line in response.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])


def summarise(seconds: float, answers: Sequence[Answer], requests: int) -> dict[str, Any]:
    """Rates, and times in milliseconds. The first ``requests`` of ``answers`` were waited for; the
    others kept the load, and their tokens of these ``seconds`` count as well."""
    tokens = sum(answer.output_tokens for answer in answers)
    awaited = [answer for answer in answers[:requests] if answer.complete]
    times = {
        "ttft": [answer.ttft for answer in awaited],
        "tpot": [answer.tpot for answer in awaited if answer.tpot is not None],
        "itl": [gap for answer in awaited for gap in answer.itl],
        "e2e": [answer.e2e for answer in awaited],
    }
    return {
        "requests": len(awaited),
        "seconds": seconds,
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "tokens": tokens,
        "output_tokens": sum(answer.output_tokens for answer in awaited),
        "tokens_per_second": tokens / seconds,
        **{f"{name}_ms": distribution(values) for name, values in times.items()},
        # Kept, so that percentiles can be taken over all rounds.
        "every_tpot_ms": [round(1000 * value, 3) for value in times["tpot"]],
        "every_e2e_ms": [round(1000 * value, 1) for value in times["e2e"]],
    }


def distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None of nothing."""
    if not seconds:
        return None
    values = 1000 * np.asarray(seconds)
    result = {"mean": float(values.mean())}
    for percent in PERCENTILES:
        result[f"p{percent}"] = float(np.percentile(values, percent))
    return result
