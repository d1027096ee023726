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


def test_many_kinds_at_once(client: OpenAI) -> None:
    kinds = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.8, "extra_body": {"top_k": 20}},
        {"logprobs": True, "top_logprobs": 1},
        {"frequency_penalty": 0.5},
        {"response_format": {"type": "json_object"}},
    ]
    alone = [ask(client, **kind).choices[0].message.content for kind in kinds[:2]]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda i: ask(client, **kinds[i % len(kinds)]), range(24)))
    assert all(answer.choices[0].message.content for answer in answers)
    assert alone[0] and alone[1]


def test_a_bad_request_is_refused_and_the_next_is_answered(client: OpenAI) -> None:
    with pytest.raises(Exception, match="temperature"):
        ask(client, temperature=-1)
    assert ask(client, "Say hello.", max_tokens=8).choices[0].message.content
