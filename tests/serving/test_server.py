# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with the demo pair, through the official client: what a user would try."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI

pytestmark = pytest.mark.timeout(
    600
)  # the first start compiles nothing, but a busy machine is slow

START_LIMIT_S = 420
MODEL = "demo"
SUM_SCHEMA = {
    "type": "object",
    "properties": {"number": {"type": "integer"}, "word": {"type": "string", "maxLength": 12}},
    "required": ["number", "word"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(demo: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a server with small prefill chunks, so that prompts are chunked."""
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [str(Path(sys.executable).with_name("vllm")), "serve", demo["model"]]
    command += ["--speculative-config", demo["speculative_config"], "--served-model-name", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"]
    command += ["--enforce-eager", "--max-num-batched-tokens", "128", "--max-num-seqs", "16"]
    command += ["--kv-cache-memory-bytes", str(512 << 20)]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until_up(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def client(server: str) -> OpenAI:
    return OpenAI(base_url=f"{server}/v1", api_key="none", timeout=300, max_retries=0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_up(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(
                f"the server ended with {process.returncode}: {log.read_text()[-4000:]}"
            )
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(
        f"the server did not answer in {START_LIMIT_S} s: {log.read_text()[-4000:]}"
    )


def ask(client: OpenAI, question: str = "List the first eight prime numbers.", **options):
    options = {"max_tokens": 48, "temperature": 0, **options}
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def metric(server: str, name: str) -> float:
    with urllib.request.urlopen(f"{server}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_a_plain_answer_accepts_tokens(server: str, client: OpenAI) -> None:
    before = metric(server, "vllm:spec_decode_num_accepted_tokens_total")
    answer = ask(client)
    assert answer.choices[0].message.content.strip()
    assert answer.usage.completion_tokens == 48 or answer.choices[0].finish_reason == "stop"
    assert metric(server, "vllm:spec_decode_num_accepted_tokens_total") > before


def test_a_streamed_answer_is_the_plain_answer(client: OpenAI) -> None:
    parts = [
        chunk.choices[0].delta.content or "" for chunk in ask(client, stream=True) if chunk.choices
    ]
    assert len(parts) > 2
    assert "".join(parts) == ask(client).choices[0].message.content


def test_two_samples_of_one_question_differ(client: OpenAI) -> None:
    answer = ask(client, "Write a sentence about the sea.", n=2, temperature=1.0)
    assert len({choice.message.content for choice in answer.choices}) == 2


def test_a_seed_repeats_an_answer(client: OpenAI) -> None:
    question = "Write a sentence about mountains."
    first, second, other = (
        ask(client, question, temperature=1.0, seed=seed).choices[0].message.content
        for seed in (7, 7, 8)
    )
    assert first == second != other


def test_logprobs_cover_every_token(client: OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob <= max(top.logprob for top in token.top_logprobs) + 1e-6
        assert token.logprob < 0.001


def test_a_json_schema_is_obeyed(client: OpenAI) -> None:
    schema = {"name": "pair", "schema": SUM_SCHEMA, "strict": True}
    answer = ask(
        client,
        "Give me a JSON object with a number and a word.",
        response_format={"type": "json_schema", "json_schema": schema},
        max_tokens=120,
    )
    value = json.loads(answer.choices[0].message.content)
    assert isinstance(value["number"], int) and isinstance(value["word"], str)


def test_stop_strings_end_the_answer_before_them(client: OpenAI) -> None:
    whole = ask(client).choices[0].message.content
    stop = whole[20:24]
    cut = ask(client, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.content == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    "options",
    [
        {"extra_body": {"top_k": 40}, "temperature": 1.0},
        {"extra_body": {"min_p": 0.1}, "temperature": 1.0},
        {"logit_bias": {"100": -5}, "temperature": 1.0},
        {"frequency_penalty": 1.0, "presence_penalty": 0.5},
        {"extra_body": {"min_tokens": 20, "repetition_penalty": 1.1}},
        {"extra_body": {"bad_words": ["the", "prime number"]}},
        {"extra_body": {"prompt_logprobs": 1}},
        {"seed": 3, "temperature": 1.0, "_long": True},
    ],
    ids=lambda options: "-".join(k for o in (options,) for k in {**o, **o.get("extra_body", {})}),
)
def test_no_option_is_refused_and_none_ends_the_server(client: OpenAI, options: dict) -> None:
    """Stock speculation answers some of these with 400, and dies of top_k and of a seeded
    prompt that is prefilled in chunks."""
    options = dict(options)
    question = (
        "Summarise: " + "the cat sat on the mat. " * 60
        if options.pop("_long", None)
        else "Count to ten."
    )
    assert ask(client, question, **options).choices[0].message.content
    assert ask(client, "Say hello.", max_tokens=8).choices[0].message.content


def rounded(logprobs: list[float]):
    """bfloat16: a batch of another shape rounds differently."""
    return pytest.approx(logprobs, abs=0.25)


STREAMED = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 5},
    "stop": {"temperature": 0, "stop": [" the"]},
}


@pytest.mark.parametrize("options", STREAMED.values(), ids=STREAMED)
def test_a_completion_in_chunks_is_the_whole_one(client: OpenAI, options: dict) -> None:
    """Ids, log-probabilities, offsets and usage, where a chunk holds several tokens."""
    request = {"model": MODEL, "prompt": "The first ten numbers are one, two,", "max_tokens": 48}
    request |= {"logprobs": 2, "extra_body": {"return_token_ids": True}, **options}
    whole = client.completions.create(**request)
    usage = {"include_usage": True}
    chunks = list(client.completions.create(**request, stream=True, stream_options=usage))
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    choice = whole.choices[0]
    assert any(len(part.token_ids) > 1 for part in parts), "one token a chunk: nothing accepted"
    assert "".join(part.text for part in parts) == choice.text
    assert [token for part in parts for token in part.token_ids] == choice.token_ids
    assert parts[-1].finish_reason == choice.finish_reason
    assert chunks[-1].usage == whole.usage
    together = {
        name: [value for part in parts for value in getattr(part.logprobs, name)]
        for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs")
    }
    assert together["tokens"] == choice.logprobs.tokens
    assert together["text_offset"] == choice.logprobs.text_offset
    assert together["token_logprobs"] == rounded(choice.logprobs.token_logprobs)
    assert all(
        t in top for t, top in zip(together["tokens"], together["top_logprobs"], strict=True)
    )
    assert len(choice.token_ids) == whole.usage.completion_tokens


def test_a_chat_in_chunks_is_the_whole_one(client: OpenAI) -> None:
    whole = ask(client, logprobs=True, top_logprobs=2)
    options = {"logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
    chunks = list(ask(client, stream=True, **options))
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    content = [token for part in parts if part.logprobs for token in part.logprobs.content]
    assert any(part.logprobs and len(part.logprobs.content) > 1 for part in parts)
    assert "".join(part.delta.content or "" for part in parts) == whole.choices[0].message.content
    expected = whole.choices[0].logprobs.content
    assert [token.token for token in content] == [token.token for token in expected]
    assert [token.logprob for token in content] == rounded([token.logprob for token in expected])
    assert all(len(token.top_logprobs) == 2 for token in content)
    assert parts[-1].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage


def score(client: OpenAI, max_tokens: int):
    """What an evaluation harness asks: the log-probabilities of a given text."""
    prompt = "Question: What is the capital of France?\nAnswer: The capital of France is Paris."
    return client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0
    )


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_text_is_scored_beside_trees(server: str, client: OpenAI, max_tokens: int) -> None:
    alone = score(client, max_tokens)
    tokens = alone.choices[0].logprobs.tokens
    before = metric(server, "vllm:spec_decode_num_accepted_tokens_total")
    with ThreadPoolExecutor(6) as pool:
        trees = [pool.submit(ask, client, f"Count to {n}.", max_tokens=100) for n in range(5, 9)]
        scores = [pool.submit(score, client, max_tokens) for _ in range(4)]
        assert all(tree.result().usage.completion_tokens > 1 for tree in trees)
        beside = [one.result() for one in scores]
    assert metric(server, "vllm:spec_decode_num_accepted_tokens_total") > before
    assert len(tokens) == alone.usage.prompt_tokens + max_tokens
    for answer in (alone, *beside):
        logprobs = answer.choices[0].logprobs
        assert "".join(logprobs.tokens) == answer.choices[0].text
        assert logprobs.tokens[: alone.usage.prompt_tokens] == tokens[: alone.usage.prompt_tokens]
        assert logprobs.token_logprobs[0] is None
        assert logprobs.token_logprobs[1:] == rounded(alone.choices[0].logprobs.token_logprobs[1:])


def test_a_bad_request_is_refused_and_the_next_is_answered(client: OpenAI) -> None:
    with pytest.raises(Exception, match="temperature"):
        ask(client, temperature=-1)
    assert ask(client, "Say hello.", max_tokens=8).choices[0].message.content
