# SPDX-License-Identifier: Apache-2.0
"""Identity with a real model and its real head, where a tokenizer is needed: structured
output, bad words and stop strings; fp32, in chat format."""

import json
from collections import defaultdict

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.serving.harness import Engine, echo_engine, plain_engine, token_ids
from tests.serving.test_identity import assert_equal_logprobs
from tests.serving.test_scheduling import preempted_in_the_step_that_scheduled_them

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


@pytest.fixture(scope="module")
def short_of_blocks(demo: dict[str, str]) -> Engine:
    """Thirteen blocks for who counts most."""
    limits = {"scheduling_policy": "priority", "max_model_len": 384, "enable_prefix_caching": False}
    # 32 positions, 31 layers, keys and values, three heads of 64, fp32; one block is nobody's.
    limits["kv_cache_memory_bytes"] = 14 * 32 * 31 * 2 * 3 * 64 * 4
    budget = {"k_max": 32, "gates": []}
    return echo_engine(demo["model"], demo["draft"], 6, budget, **{**OPTIONS, **limits})


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


def grammars_and_others(count: int = 8) -> list[SamplingParams]:
    """Half of them with a schema; greedy, seeded, with and without logprobs."""
    return [
        SamplingParams(
            temperature=0.8 if i % 4 > 1 else 0,
            seed=i,
            max_tokens=48,
            logprobs=2 if i % 3 == 0 else None,
            structured_outputs=StructuredOutputsParams(json=SCHEMA) if i % 2 else None,
        )
        for i in range(count)
    ]


def expect_same(actual: list, expected: list) -> None:
    assert token_ids(actual) == token_ids(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.outputs[0].text == b.outputs[0].text
        assert a.outputs[0].finish_reason == b.outputs[0].finish_reason
        if b.outputs[0].logprobs is not None:
            assert_equal_logprobs(a.outputs[0].logprobs, b.outputs[0].logprobs)


def test_a_grammar_survives_a_preemption_by_the_step_that_scheduled_it(
    plain: Engine, short_of_blocks: Engine
) -> None:
    """Priorities take blocks from requests that this step has scheduled. Catches a grammar that
    was advanced, or a mask that was laid out, for drafts that are not verified."""
    echo = short_of_blocks
    taken = preempted_in_the_step_that_scheduled_them(echo)
    prompts, params = chats(plain), grammars_and_others()
    expected = plain.generate(prompts, params)
    priorities = range(len(prompts), 0, -1)
    expect_same(echo.step_through(prompts, params, arrivals=1, priorities=priorities), expected)
    assert any(int(name.split("-")[0]) % 2 for name in taken), "no grammar was preempted"
    echo.record.require_tree_acceptance()


@pytest.mark.parametrize("clear_cache", [False, True])
def test_a_pause_changes_no_grammar(plain: Engine, echo: Engine, clear_cache: bool) -> None:
    """JSON, seeded and logprobs streams stand still in the middle, and go on."""
    prompts, params = chats(plain), grammars_and_others()
    expected = plain.generate(prompts, params)
    core = echo.llm.llm_engine.engine_core.engine_core
    pauses = 0

    def pause() -> None:
        nonlocal pauses
        core.pause_scheduler("keep", clear_cache)
        assert not echo.llm.llm_engine.step()
        core.resume_scheduler()
        pauses += 1

    echo.record.clear()
    steps = iter(range(10**6))
    expect_same(
        echo.step_through(prompts, params, lambda: None if next(steps) % 5 else pause()), expected
    )
    assert pauses > 3
    echo.record.require_tree_acceptance()


def test_weights_that_are_loaded_again_accept_as_before(plain: Engine, echo: Engine) -> None:
    """Catches a head that goes on with the embeddings or the output layer of before."""
    prompts, params = chats(plain), [SamplingParams(temperature=0, max_tokens=32)] * 8
    expected = plain.generate(prompts, params)
    accepted = []
    for reload in (False, True):
        if reload:
            echo.llm.collective_rpc("reload_weights")
        assert echo.llm.reset_prefix_cache()
        echo.record.clear()
        expect_same(echo.generate(prompts, params), expected)
        echo.record.require_tree_acceptance()
        accepted.append(echo.record.accepted)
    assert accepted[0] == accepted[1]


def decisions(
    echo: Engine, params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[int, ...], list]:
    """By prompt, what every step gave the request: its tree, its layers, whether a gate cut it."""
    runner, found = echo.runner, defaultdict(list)
    propose = runner.pipeline.propose_trees

    def watched(head, batch, slots, offer, load):
        proposal = propose(head, batch, slots, offer, load)
        trees, growth = proposal.trees, proposal.growth
        owners = {slot: req_id for req_id, slot in runner.slots._slots.items()}
        for i, slot in enumerate(slots.tolist()):
            count = int(trees.num_nodes[i])
            tree = [trees.tokens[i, :count].tolist(), trees.parents[i, :count].tolist()]
            prompt = tuple(runner.requests[owners[slot]].prompt_token_ids)
            found[prompt].append([*tree, int(growth.num_layers[i]), bool(growth.truncated[i])])
        return proposal

    with monkeypatch.context() as patch:
        patch.setattr(runner.pipeline, "propose_trees", watched)
        echo.generate(chats(echo), params)
    return found


@pytest.mark.parametrize(
    "special",
    [
        {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
        {"presence_penalty": 1.5, "repetition_penalty": 1.3},
        {"min_tokens": 40, "frequency_penalty": 0.7},
    ],
    ids=["grammar", "penalties", "min_tokens"],
)
def test_special_requests_move_nothing_of_the_others(
    echo: Engine, monkeypatch: pytest.MonkeyPatch, special: dict
) -> None:
    """Gates, trees and counts of plain requests are theirs, whatever sits beside them. Catches a
    gate or a score that is taken over the batch, and rows of one request read for another."""
    gates = [{"depth": 0, "threshold": 0.3}, {"depth": 2, "threshold": 0.3}]
    before = echo.runner.pipeline.config.to_dict()
    echo.runner.set_options({"gates": gates, "k_max": 64})
    usual = [SamplingParams(temperature=0, max_tokens=48) for _ in QUESTIONS]
    mixed = [
        SamplingParams(temperature=0, max_tokens=48, **(special if i % 2 else {})) for i in range(8)
    ]
    try:
        echo.record.clear()
        alone = decisions(echo, usual, monkeypatch)
        beside = decisions(echo, mixed, monkeypatch)
        echo.record.require_tree_acceptance()
    finally:
        echo.runner.set_options(before)
    prompts = [tuple(chat) for chat in chats(echo)]
    for prompt in prompts[::2]:
        assert alone[prompt] == beside[prompt]
        cut = [truncated for *_, truncated in alone[prompt]]
        assert any(cut)
        assert not all(cut)
    assert any(alone[prompt] != beside[prompt] for prompt in prompts[1::2]), "nothing was special"


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


def test_a_thinking_budget_holds_in_a_batch_that_vllm_made_anew(
    plain: Engine, echo: Engine
) -> None:
    """It does so when the length that fits is not the model's (--max-model-len -1). Catches a
    budget that counts drafts as rows there, and ends the thinking of somebody else."""
    echo.runner._init_max_num_blocks = []
    before = echo.runner.input_batch
    echo.runner.may_reinitialize_input_batch(echo.runner.kv_cache_config)
    assert echo.runner.input_batch is not before
    assert echo.runner.input_batch.thinking_budget_state_holder is not None
    test_a_thinking_budget_ends_thinking_where_plain_decoding_does(plain, echo)
