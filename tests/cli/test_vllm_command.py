# SPDX-License-Identifier: Apache-2.0
"""The patched `vllm` command, started as a user starts it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.integration.heads import kit
from tests.serving import tiny

pytestmark = pytest.mark.timeout(300)
VLLM = Path(sys.executable).parent / "vllm"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_target(tmp_path_factory.mktemp("target"))


def vllm(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ) | {"VLLM_LOGGING_LEVEL": "ERROR"}
    return subprocess.run(
        [str(VLLM), *arguments], env=env, capture_output=True, text=True, check=False
    )


def test_the_command_starts_under_the_cpu_wheels_name() -> None:
    done = vllm("--version")
    assert (done.returncode, done.stdout.strip()[:6]) == (0, "0.32.0")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("/no/such/echo.json", "there is no file '/no/such/echo.json'"),
        (
            {"method": "echo", "model": "h", "echo": {"gates": [{"depth": 9, "threshold": 0.1}]}},
            "echo.gates[0].depth: 9 lies beyond echo.max_depth 6; give a depth from 0 to 6",
        ),
        ({"method": "echo", "model": "/no/such/head"}, "there is no folder '/no/such/head'"),
    ],
    ids=["argument", "option", "head"],
)
def test_serve_ends_with_one_message(target: Path, config: str | dict, expected: str) -> None:
    expect_one_message(target, config, expected)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"max_model_len": 4096}, "max_model_len: the head's 4096 tokens"),
        ({"quantization": "gptq"}, 'quantization: "gptq" does not fit the head'),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size: 2 does not fit"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_keys_of_vllms_own_that_do_not_fit_end_it_so_too(
    target: Path, head: Path, keys: dict, expected: str
) -> None:
    """vLLM's validators would end it with a traceback and status 1."""
    expect_one_message(target, {"method": "echo", "model": str(head), **keys}, expected)


def expect_one_message(target: Path, config: str | dict, expected: str) -> None:
    text = config if isinstance(config, str) else json.dumps(config)
    done = vllm("serve", str(target), "--skip-tokenizer-init", "--speculative-config", text)
    errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert done.returncode == 2
    assert len(errors) == 1, done.stderr
    assert expected in errors[0]
    assert "Traceback" not in done.stdout + done.stderr


def test_serve_ends_with_one_message_for_a_head_that_lacks_a_weight(
    target: Path, head: Path, tmp_path: Path
) -> None:
    """vLLM would serve on what the memory held."""
    folder = shutil.copytree(head, tmp_path / "head")
    kit.change_tensors(folder, kit.drop("midlayer.self_attn.k_proj.weight"))
    text = json.dumps({"method": "echo", "model": str(folder)})
    done = vllm("serve", str(target), "--skip-tokenizer-init", "--speculative-config", text)
    assert done.returncode == 2
    assert "has no tensor midlayer.self_attn.k_proj.weight" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stdout + done.stderr
