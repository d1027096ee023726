# SPDX-License-Identifier: Apache-2.0
"""A client that keeps a number of streaming chat requests running, and times them.

Definitions are those of `vllm bench serve`: TTFT up to the first chunk with a choice, E2E up to
the last one, TPOT = (E2E - TTFT) / (tokens - 1), ITL between chunks, throughput over the time from
the first request to the last answer. It is not used itself because importing vLLM takes ten
seconds and half a gigabyte, which is more than a measurement may cost.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
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

    prompts: Sequence[str]
    concurrency: int
    output_tokens: int
    """Most tokens of an answer, on average: see ``output_limit``."""
    temperature: float
    seed: int
    """Of the first request; the others count on."""


@dataclass
class Answer:
    """One request's times, in seconds."""

    ttft: float = 0.0
    e2e: float = 0.0
    itl: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def tpot(self) -> float | None:
        """None for an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)


def send(url: str, model: str, load: Load) -> dict[str, Any]:
    """Send all requests of ``load``, wait for all answers, and sum up."""
    seconds, answers = asyncio.run(_send_all(url, model, load))
    return summarise(seconds, answers)


def output_limit(mean: int, number: int) -> int:
    """Most tokens of the answer to request ``number``: spread evenly from half of ``mean`` to one
    and a half of it. With one limit for all, plain decoding answers every slot in lockstep, which
    no traffic does: it never has a slot that ends later than others, and speculation has."""
    return max(1, round(mean * (LONGEST - 1 + GOLDEN * number % 1)))


async def _send_all(url: str, model: str, load: Load) -> tuple[float, list[Answer]]:
    answers: list[Answer] = []
    waiting = enumerate(load.prompts)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        start = time.perf_counter()
        slots = [
            asyncio.create_task(_slot(session, url, model, load, waiting, answers))
            for _ in range(min(load.concurrency, len(load.prompts)))
        ]
        try:
            await asyncio.gather(*slots)
        finally:
            for slot in slots:
                slot.cancel()
        return time.perf_counter() - start, answers


async def _slot(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    load: Load,
    waiting: Iterator[tuple[int, str]],
    answers: list[Answer],
) -> None:
    """One request after the other, as long as there are any."""
    for number, prompt in waiting:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": output_limit(load.output_tokens, load.seed + number),
            "temperature": load.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if load.temperature > 0:
            body["seed"] = load.seed + number
        answers.append(await _ask(session, url, body))


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    answer = Answer()
    start = last = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                text = (await response.text()).strip()
                raise BenchmarkError(f"the server answered {response.status}: {text[:500]}")
            async for chunk in _chunks(response):
                now = time.perf_counter()
                if "error" in chunk:
                    raise BenchmarkError(f"the server answered {chunk['error']}")
                if chunk.get("choices"):
                    if answer.ttft == 0.0:
                        answer.ttft = now - start
                    else:
                        answer.itl.append(now - last)
                    last = now
                elif usage := chunk.get("usage"):
                    answer.prompt_tokens = usage["prompt_tokens"]
                    answer.output_tokens = usage["completion_tokens"]
    except aiohttp.ClientError as error:
        raise ConnectionError(f"the server stopped answering: {error}") from None
    if answer.output_tokens == 0:
        raise ConnectionError("the server ended an answer before it was complete")
    answer.e2e = last - start
    return answer


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events."""
    async for line in response.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])


def summarise(seconds: float, answers: Sequence[Answer]) -> dict[str, Any]:
    """Rates, and times in milliseconds."""
    tokens = sum(answer.output_tokens for answer in answers)
    times = {
        "ttft": [answer.ttft for answer in answers],
        "tpot": [answer.tpot for answer in answers if answer.tpot is not None],
        "itl": [gap for answer in answers for gap in answer.itl],
        "e2e": [answer.e2e for answer in answers],
    }
    return {
        "requests": len(answers),
        "seconds": seconds,
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "output_tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "requests_per_second": len(answers) / seconds,
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
