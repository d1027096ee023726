# SPDX-License-Identifier: Apache-2.0
"""Through vLLM's own front door: what echo becomes, what it refuses, and what it leaves alone."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

pytest.importorskip("vllm")

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, build_logitsprocs

from vllm_echo.core.config import EchoConfig
from vllm_echo.errors import EchoConfigError
from vllm_echo.integration.compat import ECHO_CPU_WORKER, STOCK_CPU_WORKER
from vllm_echo.integration.doors import (
    is_echo,
    load_speculative_config,
    normalise_speculative_config,
)

pytestmark = pytest.mark.timeout(300)  # the first look at an architecture takes vLLM ten seconds


def engine_config(target: Path, **options: Any) -> VllmConfig:
    args = {"model": str(target), "skip_tokenizer_init": True, "max_model_len": 128} | options
    return EngineArgs(**args).create_engine_config()


def echo(head: Path, **options: Any) -> dict[str, Any]:
    return {"method": "echo", "model": str(head)} | options


def parse(*arguments: str) -> argparse.Namespace:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return parser.parse_args(list(arguments))


@pytest.mark.parametrize("form", ["dict", "inline", "file", "aliases"])
def test_every_form_becomes_eagle3_with_our_options(
    target: Path, head: Path, tmp_path: Path, form: str
) -> None:
    raw = echo(head, num_speculative_tokens=5, echo={"k_max": 9})
    (tmp_path / "echo.json").write_text(json.dumps(raw))
    options: dict[str, Any] = {
        "dict": {"speculative_config": raw},
        "inline": {"speculative_config": json.dumps(raw)},
        "file": {"speculative_config": str(tmp_path / "echo.json")},
        # What is left out comes from --spec-model and --spec-tokens.
        "aliases": {
            "speculative_config": {"method": "echo", "echo": {"k_max": 9}},
            "spec_model": str(head),
            "spec_tokens": 5,
        },
    }[form]
    config = engine_config(target, **options)
    speculative = config.speculative_config
    assert speculative is not None
    assert is_echo(speculative)
    assert (speculative.method, speculative.num_speculative_tokens) == ("eagle3", 5)
    assert speculative.disable_padded_drafter_batch
    assert speculative.echo is not None
    assert EchoConfig.from_dict(speculative.echo) == EchoConfig.from_speculative_config(raw)
    assert config.parallel_config.worker_cls == ECHO_CPU_WORKER
    assert not config.scheduler_config.async_scheduling


def test_the_same_arguments_may_be_used_twice(target: Path, head: Path) -> None:
    args = EngineArgs(model=str(target), skip_tokenizer_init=True, speculative_config=echo(head))
    first, second = args.create_engine_config(), args.create_engine_config()
    assert first.speculative_config is not None and second.speculative_config is not None
    assert first.speculative_config.echo == second.speculative_config.echo


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"async_scheduling": True}, "leave --async-scheduling out"),
        ({"kv_cache_dtype": "fp8"}, "KV cache of type fp8"),
        # vLLM serves both without speculation; tree attention reads the query's own type.
        (
            {"dtype": "float32", "kv_cache_dtype": "bfloat16"},
            "KV cache of type bfloat16 beside a model of type float32 .* use --kv-cache-dtype auto",
        ),
        (
            {"dtype": "bfloat16", "kv_cache_dtype": "float16"},
            "KV cache of type float16 beside a model of type bfloat16 .* --kv-cache-dtype bfloat16",
        ),
        ({"enable_lora": True}, "LoRA"),
        ({"enable_prompt_embeds": True}, "prompt embeddings"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"worker_cls": STOCK_CPU_WORKER}, "leave --worker-cls out"),
        ({"logits_processors": ["a.b:C"]}, "custom logits processors"),
        ({"hf_overrides": {"sliding_window": 64}}, "sliding windows"),
        ({"hf_overrides": {"layer_types": ["chunked_attention"] * 4}}, "chunked"),
        ({"hf_overrides": {"attn_logit_softcapping": 50.0}}, "soft-capped"),
        ({"hf_overrides": {"alibi": True}}, "ALiBi"),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "KV connectors",
        ),
    ],
)
def test_what_is_not_served_is_refused_with_a_remedy(
    target: Path, head: Path, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(EchoConfigError, match=expected) as caught:
        engine_config(target, speculative_config=echo(head), **options)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value), "a remedy follows"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_models_own_dtype_may_be_named_for_the_kv_cache(
    target: Path, head: Path, dtype: str
) -> None:
    options = {"dtype": dtype, "kv_cache_dtype": dtype}
    config = engine_config(target, speculative_config=echo(head), **options)
    assert config.cache_config.cache_dtype == dtype


@pytest.mark.parametrize(
    ("keys", "options", "expected"),
    [
        ({"max_model_len": 129}, {}, "max_model_len: the head's 129 .* engine's 128; give at most"),
        ({"max_model_len": 4096}, {"max_model_len": None}, "max_model_len: .* the engine's 2048"),
        (
            {"draft_tensor_parallel_size": 2},
            {},
            "draft_tensor_parallel_size: 2 does not fit .*tensor_parallel_size 1, .* give 1",
        ),
        # vLLM takes it, and shards the head over both ranks all the same.
        (
            {"draft_tensor_parallel_size": 1},
            {"tensor_parallel_size": 2},
            "draft_tensor_parallel_size: 1 does not fit .*tensor_parallel_size 2, .* give 2",
        ),
        ({"quantization": "gtpq"}, {}, 'quantization: "gtpq" is no method .*did you mean .gptq.'),
        ({"quantization": ""}, {}, 'quantization: "" is no method that vLLM knows'),
        ({"quantization": "fp8"}, {}, 'no kernels for "fp8" on a CPU; give another method'),
        # These serve until the worker loads the head.
        ({"quantization": "awq"}, {}, 'quantization: "awq" does not fit the head .*; leave'),
        ({"quantization": "compressed-tensors"}, {}, '"compressed-tensors" does not fit the head'),
        # vLLM's own words where we know nothing better.
        ({}, {"tensor_parallel_size": 3}, "speculative_config: vLLM refuses .*divisible by tensor"),
    ],
)
def test_keys_of_vllms_own_that_do_not_fit_are_one_message(
    target: Path, head: Path, keys: dict[str, Any], options: dict[str, Any], expected: str
) -> None:
    """vLLM answers some with a traceback of pydantic's, others when the worker is up."""
    with pytest.raises(EchoConfigError, match=expected) as caught:
        engine_config(target, speculative_config=echo(head, **keys), **options)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value), "a remedy follows"


def test_what_vllm_refuses_of_another_method_stays_vllms_error(target: Path, head: Path) -> None:
    raw = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    with pytest.raises(ValidationError, match="speculative_max_model_len=129"):
        engine_config(target, speculative_config=raw | {"max_model_len": 129})


def test_a_head_may_be_quantised_while_it_is_loaded(target: Path, head: Path) -> None:
    raw = echo(head, quantization="int8_per_channel_weight_only")
    speculative = engine_config(target, speculative_config=raw).speculative_config
    assert speculative is not None and speculative.draft_model_config is not None
    assert speculative.draft_model_config.quantization == "int8_per_channel_weight_only"


def test_model_runner_v2_is_refused(
    target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(EchoConfigError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        engine_config(target, speculative_config=echo(head))


def test_another_platform_is_refused(
    target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(EchoConfigError, match="CUDA adapter is not there yet.*eagle3"):
        engine_config(target, speculative_config=echo(head))


def test_a_worker_of_ones_own_is_honoured(target: Path, head: Path) -> None:
    config = engine_config(target, speculative_config=echo(head), worker_cls="my.own.Worker")
    assert config.parallel_config.worker_cls == "my.own.Worker"


def test_the_command_line_takes_json_files_and_dots(tmp_path: Path) -> None:
    raw = {"method": "echo", "model": "head", "echo": {"k_max": 9}}
    path = tmp_path / "echo.json"
    path.write_text(json.dumps(raw))
    for arguments in (
        ["--speculative-config", json.dumps(raw)],
        ["--speculative-config", str(path)],
        ["-sc.method", "echo", "-sc.model", "head", "-sc.echo.k_max", "9"],
    ):
        assert parse(*arguments).speculative_config == raw
    assert parse("--spec-method", "echo").spec_method == "echo"


@pytest.mark.parametrize("text", ["", "None", "null"])
def test_no_configuration_stays_none(text: str) -> None:
    assert parse("--speculative-config", text).speculative_config is None
    assert parse().speculative_config is None


def test_the_command_line_refuses_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--speculative-config", "/no/such/echo.json")
    assert caught.value.code == 2
    assert "there is no file '/no/such/echo.json'" in capsys.readouterr().err


STOCK_CONFIGS: list[dict[str, Any]] = [
    {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    {"method": "eagle3", "num_speculative_tokens": 3},
]


@pytest.mark.parametrize("raw", STOCK_CONFIGS, ids=lambda raw: raw["method"])
def test_other_methods_get_the_configuration_that_vllm_would_build(
    target: Path, head: Path, raw: dict[str, Any]
) -> None:
    raw = raw | ({"model": str(head)} if raw["method"] == "eagle3" else {})
    config = engine_config(target, speculative_config=dict(raw))
    built = config.speculative_config
    assert built is not None
    alone = SpeculativeConfig(
        **raw,
        target_model_config=built.target_model_config,
        target_parallel_config=built.target_parallel_config,
    )
    assert built.echo is None
    assert not is_echo(built)
    plain = ("target_model_config", "target_parallel_config", "draft_model_config")
    names = [name for name in vars(alone) if name not in (*plain, "draft_parallel_config")]
    assert {n: getattr(built, n) for n in names} == {n: getattr(alone, n) for n in names}
    assert config.parallel_config.worker_cls == STOCK_CPU_WORKER


def test_a_method_changed_on_the_way_does_not_drop_echo_silently() -> None:
    """vLLM takes the method from the checkpoint when a speculators checkpoint is served."""
    loaded = load_speculative_config({"method": "echo", "model": "head"}) | {"method": "eagle3"}
    with pytest.raises(EchoConfigError, match='method: is "eagle3"'):
        normalise_speculative_config(loaded, None)


def test_without_speculation_nothing_of_ours_is_there(target: Path) -> None:
    config = engine_config(target)
    assert config.speculative_config is None
    assert config.parallel_config.worker_cls == STOCK_CPU_WORKER


@pytest.mark.parametrize("method", ["ehco", "Echo", "ecko"])
def test_a_misspelt_method_is_one_message(target: Path, head: Path, method: str) -> None:
    raw = {"method": method, "model": str(head), "num_speculative_tokens": 3}
    with pytest.raises(EchoConfigError, match='did you mean "echo"'):
        engine_config(target, speculative_config=raw)


def test_sampling_and_processors_follow_the_method(target: Path, head: Path) -> None:
    eagle3 = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    with_echo = engine_config(target, speculative_config=echo(head))
    with_eagle3 = engine_config(target, speculative_config=eagle3)
    params = SamplingParams(min_p=0.1, logit_bias={3: 1.0})
    params._validate_spec_decode(None)
    params._validate_spec_decode(with_echo.speculative_config)
    with pytest.raises(VLLMValidationError, match="min_p and logit_bias"):
        params._validate_spec_decode(with_eagle3.speculative_config)

    def names(config: VllmConfig) -> list[str]:
        processors = build_logitsprocs(config, torch.device("cpu"), False, False)
        return [type(processor).__name__ for processor in processors.all]

    everything = [cls.__name__ for cls in BUILTIN_LOGITS_PROCESSORS]
    assert sorted(names(with_echo)) == sorted(everything)
    assert sorted(names(engine_config(target))) == sorted(everything)
    assert names(with_eagle3) == ["MinTokensLogitsProcessor"]
    with pytest.raises(ValueError, match="Custom logits processors"):
        build_logitsprocs(with_echo, torch.device("cpu"), False, False, ["a.b:C"])
