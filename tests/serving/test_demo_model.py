# SPDX-License-Identifier: Apache-2.0
"""Identity with a real model and its real head, where a tokenizer is needed: structured
output, bad words and stop strings; fp32, in chat format."""

import json

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.serving.harness import Engine, echo_engine, plain_engine, token_ids

pytestmark = pytest.mark.timeout(400)

QUESTIONS = [
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is 17 times 23? Show your work.",
    "Explain in two sentences why the sky is blue.",
    "List five animals and the sounds they make.",
    "A train travels 60 miles in 1.5 hours. What is its average speed?",
    "Write a polite email that declines an invitation.",
    "Name the planets of the solar system in order.",
    "def is_palindrome(s):\n    # complete this function",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "size": {"type": "string", "enum": ["small", "medium", "large"]},
        "legs": {"type": "integer"},
    },
    "required": ["name", "size", "legs"],
    "additionalProperties": False,
}
OPTIONS = {
    "kv_cache_memory_bytes": 256 << 20,
    "max_num_seqs": 8,
    "max_model_len": 1024,
    "max_num_batched_tokens": 2048,
    "skip_tokenizer_init": False,
    "reasoning_config": {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
}


@pytest.fixture(scope="module")
def plain(demo: dict[str, str]) -> Engine:
    return plain_engine(demo["model"], **OPTIONS)


@pytest.fixture(scope="module")
def echo(demo: dict[str, str]) -> Engine:
    return echo_engine(demo["model"], demo["draft"], 6, {"k_max": 32, "gates": []}, **OPTIONS)


def chats(engine: Engine) -> list[list[int]]:
    tokenizer = engine.llm.get_tokenizer()
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]


def both(plain: Engine, echo: Engine, params: list[SamplingParams]) -> list:
    prompts = chats(plain)
    expected = plain.generate(prompts, params)
    echo.record.clear()
    actual = echo.generate(prompts, params)
    assert token_ids(actual) == token_ids(expected)
    assert [o.outputs[0].text for o in actual] == [o.outputs[0].text for o in expected]
    return actual


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_real_head_changes_no_token(plain: Engine, echo: Engine, temperature: float) -> None:
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=64) for i in range(8)]
    both(plain, echo, params)
    echo.record.require_tree_acceptance()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_structured_output_drafts_a_chain_and_stays_in_its_grammar(
    plain: Engine, echo: Engine, temperature: float
) -> None:
    """Half the batch has a schema, the other half goes on drafting trees."""
    params = []
    for i in range(8):
        grammar = StructuredOutputsParams(json=SCHEMA) if i % 2 else None
        params.append(
            SamplingParams(
                temperature=temperature, seed=i, max_tokens=64, structured_outputs=grammar
            )
        )
    outputs = both(plain, echo, params)
    for output in outputs[1::2]:
        if output.outputs[0].finish_reason == "stop":
            assert set(json.loads(output.outputs[0].text)) == set(SCHEMA["required"])
    echo.record.require_tree_acceptance()


def test_structured_output_alone_accepts_its_chains(plain: Engine, echo: Engine) -> None:
    grammar = StructuredOutputsParams(json=SCHEMA)
    params = [SamplingParams(temperature=0, max_tokens=64, structured_outputs=grammar)] * 8
    both(plain, echo, params)
    assert echo.record.accepted > 0
    assert echo.record.non_first_siblings == 0


def test_bad_words_and_stop_strings(plain: Engine, echo: Engine) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=64, bad_words=["the", " is"]),
        SamplingParams(temperature=0, max_tokens=64, stop=[".", "2"]),
        SamplingParams(temperature=0, max_tokens=64, stop=[" a"], include_stop_str_in_output=True),
        SamplingParams(temperature=0, max_tokens=64, logit_bias={30: -50.0}),
    ] * 2
    both(plain, echo, params)
    echo.record.require_tree_acceptance()


def test_a_thinking_budget_ends_thinking_where_plain_decoding_does(
    plain: Engine, echo: Engine
) -> None:
    """Its requests draft nothing; the others in the batch go on drafting trees."""
    tokenizer = plain.llm.get_tokenizer()
    opened = tokenizer.encode("<think>")
    prompts = [chat + opened if i % 2 else chat for i, chat in enumerate(chats(plain))]
    params = [
        SamplingParams(
            temperature=0.7 if i % 3 else 0,
            seed=i,
            max_tokens=48,
            thinking_token_budget=3 + i if i % 2 else None,
        )
        for i in range(8)
    ]
    expected = plain.generate(prompts, params)
    echo.record.clear()
    actual = echo.generate(prompts, params)
    assert token_ids(actual) == token_ids(expected)
    assert any("</think>" in output.outputs[0].text for output in actual[1::2])
    echo.record.require_tree_acceptance()
