# SPDX-License-Identifier: Apache-2.0
"""Echo emits what plain decoding emits, token for token, whatever the client asks for.

fp32, the same tiny model, an oracle drafter that plants accepted tokens at random places
of the tree (see ``harness`` and ``oracle``). Each test asserts that trees were accepted.
"""

import math

import pytest
from vllm import SamplingParams

from tests.serving.harness import Engine, random_prompts, repeat, token_ids, truths_of

NUM_PROMPTS = 100
OUTPUT_TOKENS = 24
LOGPROB_TOLERANCE = 1e-3  # fp32 sums in another order: about 1e-5 here; the bar is 1e-3


def expect_identity(
    plain: Engine, echo: Engine, params: list[SamplingParams], batch: int = 32, prompts=None
) -> tuple[list, list]:
    """Generate with both engines; returns both outputs for more questions."""
    prompts = prompts or random_prompts(len(params))
    expected = plain.generate_in_batches(prompts, params, 32)
    echo.follow(truths_of(expected))
    echo.record.clear()
    actual = echo.generate_in_batches(prompts, params, batch)
    different = [
        i
        for i, (a, b) in enumerate(zip(token_ids(actual), token_ids(expected), strict=True))
        if a != b
    ]
    assert not different, (
        f"{len(different)} of {len(params)} outputs differ, first: request {different[0]}"
    )
    echo.record.require_tree_acceptance()
    assert echo.record.largest_step <= echo.runner.pipeline.config.k_max
    return expected, actual


def greedy(**options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, **options)


def seeded(seed: int, **options) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "seed": seed, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        | options
    )


SAMPLERS = {
    "temperature": {},
    "low_temperature": {"temperature": 0.3},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.8},
    "top_k_and_top_p": {"top_k": 40, "top_p": 0.9},
    "min_p": {"min_p": 0.05},
}


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_greedy_output_is_that_of_plain_decoding(plain: Engine, echo: Engine, batch: int) -> None:
    expect_identity(plain, echo, [greedy()] * NUM_PROMPTS, batch)


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_seeded_sampling_draws_the_tokens_of_plain_decoding(
    plain: Engine, echo: Engine, batch: int, sampler: str
) -> None:
    """One draw per output token: a rejected node must not advance the request's stream."""
    expect_identity(
        plain, echo, repeat(lambda i: seeded(i, **SAMPLERS[sampler]), NUM_PROMPTS), batch
    )


@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_sees_its_own_path_only(
    plain: Engine, echo: Engine, options: dict, temperature: float
) -> None:
    """Linear prefixes of a tree (siblings counted as history) change penalised logits."""
    params = repeat(lambda i: seeded(i, **options, temperature=temperature), 40)
    expect_identity(plain, echo, params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processors_apply_at_every_node(plain: Engine, echo: Engine, temperature: float) -> None:
    """logit_bias, allowed_token_ids and min_p in one batch with requests that use none."""
    options = [
        {"logit_bias": {7: 4.0, 11: -100.0}},
        {"allowed_token_ids": list(range(10, 200))},
        {"min_p": 0.1},
        {},
    ]
    expect_identity(
        plain, echo, repeat(lambda i: seeded(i, **options[i % 4], temperature=temperature), 40)
    )


def test_bad_words_end_at_the_right_node(plain: Engine, echo: Engine) -> None:
    """A two-token bad word forbids its last token only after its first, on this path."""
    prompts = random_prompts(24)
    free = plain.generate_in_batches(prompts, [greedy()] * 24, 32)
    params = []
    for output in free:
        tokens = output.outputs[0].token_ids
        one = greedy()
        one._bad_words_token_ids = [[tokens[4]], list(tokens[7:9]), list(tokens[10:13])]
        params.append(one)
    expected, _ = expect_identity(plain, echo, params, prompts=prompts)
    assert token_ids(expected) != token_ids(free), "the bad words never mattered"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_is_reached_inside_an_accepted_path(
    plain: Engine, echo: Engine, temperature: float
) -> None:
    """Stop tokens are masked up to min_tokens, not up to the step in which it is reached."""
    stops = list(range(3, 384, 3))
    params = repeat(
        lambda i: seeded(
            i, temperature=temperature, min_tokens=3 + i % 9, stop_token_ids=stops, ignore_eos=False
        ),
        60,
    )
    expected, _ = expect_identity(plain, echo, params)
    lengths = {len(o.outputs[0].token_ids) - (3 + i % 9) for i, o in enumerate(expected)}
    assert min(lengths) >= 0 and len(lengths) > 3, "requests should stop soon after min_tokens"


def test_stop_tokens_and_max_tokens_cut_an_accepted_path(plain: Engine, echo: Engine) -> None:
    """Nothing leaks past the stop, and usage counts are right."""
    params = repeat(
        lambda i: greedy(stop_token_ids=list(range(5, 384, 7))) if i % 2 else greedy(), 40
    )
    for i, one in enumerate(params):
        one.max_tokens = 2 + i % 11
    expected, actual = expect_identity(plain, echo, params)
    for a, b in zip(actual, expected, strict=True):
        assert a.outputs[0].finish_reason == b.outputs[0].finish_reason
        assert a.outputs[0].stop_reason == b.outputs[0].stop_reason


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_leaves_behind_what_plain_decoding_leaves(
    plain: Engine, echo: Engine, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Its last token is not computed, all others are, and vLLM never cuts what a step accepted.
    Catches a path that leads on behind an end: it counts as computed, and in the metrics."""
    prompts = random_prompts(40)
    endless = repeat(lambda i: seeded(i, temperature=temperature), 40)
    free = plain.generate_in_batches(prompts, endless, 32)
    params = repeat(lambda i: seeded(i, temperature=temperature), 40)
    for index, (one, output) in enumerate(zip(params, free, strict=True)):
        one.stop_token_ids = [output.outputs[0].token_ids[2 + index % 20]]
    ends, update = [], echo.scheduler._update_request_with_output

    def watched(request, new_token_ids, **options):
        num_new = len(new_token_ids)
        kept, stopped = update(request, new_token_ids, **options)
        if stopped:
            ends.append((num_new - len(kept), request.num_tokens - request.num_computed_tokens))
        return kept, stopped

    monkeypatch.setattr(echo.scheduler, "_update_request_with_output", watched)
    echo.follow(truths_of(free), hit_rate=1.0)
    echo.record.clear()
    echo.generate_in_batches(prompts, params, 8)
    echo.record.require_tree_acceptance()
    assert ends == [(0, 1)] * 40


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_logprobs", [0, 1, 5, 20])
def test_logprobs_follow_the_accepted_path(
    plain: Engine, echo: Engine, num_logprobs: int, temperature: float
) -> None:
    """Gathered by offset instead of by path they would belong to rejected siblings."""
    params = repeat(lambda i: seeded(i, logprobs=num_logprobs, temperature=temperature), 40)
    expected, actual = expect_identity(plain, echo, params)
    for a, b in zip(actual, expected, strict=True):
        assert_equal_logprobs(a.outputs[0].logprobs, b.outputs[0].logprobs)


def test_prompt_logprobs_beside_those_of_the_output(plain: Engine, echo: Engine) -> None:
    params = [greedy(logprobs=2, prompt_logprobs=3)] * 20
    expected, actual = expect_identity(plain, echo, params)
    for a, b in zip(actual, expected, strict=True):
        assert_equal_logprobs(a.outputs[0].logprobs, b.outputs[0].logprobs)
        assert_equal_logprobs(a.prompt_logprobs[1:], b.prompt_logprobs[1:])


def assert_equal_logprobs(actual: list[dict], expected: list[dict]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.keys() == b.keys()
        for token, logprob in b.items():
            assert math.isclose(a[token].logprob, logprob.logprob, abs_tol=LOGPROB_TOLERANCE)
            # Two tokens of almost equal probability may swap places by rounding.
            assert abs(a[token].rank - logprob.rank) <= 1


def test_logprobs_of_named_tokens_differ_by_request(plain: Engine, echo: Engine) -> None:
    """Lists of different lengths, and requests without: below the root fewer requests walk,
    and their tensors must keep the width of the whole batch."""
    for params in (
        [greedy(logprob_token_ids=[5, 6, 7]) if i % 2 else seeded(i) for i in range(12)],
        [greedy(logprob_token_ids=list(range(5, 6 + i))) for i in range(8)],
    ):
        expected, actual = expect_identity(plain, echo, params)
        for a, b in zip(actual, expected, strict=True):
            assert (a.outputs[0].logprobs is None) == (b.outputs[0].logprobs is None)
            if b.outputs[0].logprobs is not None:
                assert_equal_logprobs(a.outputs[0].logprobs, b.outputs[0].logprobs)


def test_every_sample_of_n_is_its_own_request(plain: Engine, echo: Engine) -> None:
    params = repeat(lambda i: seeded(i, n=3), 20)
    expected, _ = expect_identity(plain, echo, params, prompts=random_prompts(20, seed=5))
    assert all(len({tuple(s) for s in samples}) == 3 for samples in token_ids(expected))


def test_a_mixed_batch_keeps_every_request_exact(plain: Engine, echo: Engine) -> None:
    """Greedy, seeded, penalised, biased, with and without logprobs, side by side."""
    kinds = [
        lambda i: greedy(),
        lambda i: seeded(i),
        lambda i: seeded(i, top_k=30, logprobs=2),
        lambda i: greedy(frequency_penalty=1.0),
        lambda i: greedy(logit_bias={9: 3.0}),
        lambda i: seeded(i, min_p=0.1, repetition_penalty=1.2),
        lambda i: greedy(logprobs=4, min_tokens=6, stop_token_ids=[3, 4, 5]),
    ]
    expect_identity(plain, echo, repeat(lambda i: kinds[i % len(kinds)](i), 70))


def test_unseeded_sampling_is_random(echo: Engine) -> None:
    """A platform that silently decodes greedily would pass every identity test above."""
    params = [SamplingParams(temperature=1.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)] * 8
    prompts = random_prompts(8)
    assert token_ids(echo.generate(prompts, params)) != token_ids(echo.generate(prompts, params))
