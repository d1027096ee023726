# SPDX-License-Identifier: Apache-2.0
"""One test for each way to get the configuration wrong: the message names the key, what is wrong
and what would be right, in one line."""

from pathlib import Path
from typing import Any

import pytest

from tests.core.measured import CALIBRATION
from vllm_echo.core.config import POLICIES, EchoConfig, parse_speculative_config
from vllm_echo.errors import EchoConfigError

BASE: dict[str, Any] = {"method": "echo", "model": "head"}
NAN = float("nan")


def refused(raw: Any) -> str:
    with pytest.raises(EchoConfigError) as caught:
        EchoConfig.from_speculative_config(raw)
    message = str(caught.value)
    assert "\n" not in message
    assert not isinstance(caught.value, ValueError), "pydantic would wrap it in its own report"
    return message


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        ({"model": None}, ("model: is missing", "folder")),
        ({"model": ""}, ("model: is empty", "hub")),
        ({"model": 3}, ("model: 3 is a number", "folder")),
        ({"num_speculative_tokens": 0}, ("num_speculative_tokens: 0", "from 1 to 255")),
        ({"num_speculative_tokens": 256}, ("num_speculative_tokens: 256", "from 1 to 255")),
        ({"num_speculative_tokens": True}, ("num_speculative_tokens: true is true or false",)),
        ({"num_speculative_tokens": "8"}, ('num_speculative_tokens: "8" is a text', "1 to 255")),
        ({"num_speculative_tokens": 8.0}, ("num_speculative_tokens: 8.0 is a number with",)),
        ({"num_speculative_token": 8}, ("num_speculative_token: unknown", "_tokens'?")),
        ({"num-speculative-tokens": 8, "num_speculative_tokens": 8}, ("given twice",)),
        ({"prompt_lookup_max": 4}, ("prompt_lookup_max: does not go", "remove it")),
        ({"attention_backend": "CPU_ATTN"}, ("attention_backend: does not go", "remove it")),
        ({"num_speculative_tokens_per_batch_size": []}, ("does not go", "remove it")),
        ({"k_max": 4}, ("k_max: stands at the top level", '"echo"')),
        ({"draft_tensor_parallel_size": 0}, ("draft_tensor_parallel_size: 0", "from 1 up")),
        ({"enforce_eager": 1}, ("enforce_eager: 1 is a number", "true or false")),
        ({"quantization": 8}, ("quantization: 8 is a number", "a text")),
        ({"echo": [1]}, ("echo: [1] is a list", "an object")),
        ({"echo": "static"}, ('echo: "static" is a text', "an object")),
        ({"method": "eagle3", "echo": {}}, ('method: is "eagle3"', "set the method")),
    ],
)
def test_top_level(top: dict[str, Any], expected: tuple[str, ...]) -> None:
    message = refused(BASE | top)
    assert all(part in message for part in expected), message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"policy": "tree"}, ('echo.policy: "tree" is no policy', ", ".join(POLICIES))),
        ({"policy": "statik"}, ("did you mean 'static'?",)),
        ({"policy": "fixed_threshold"}, ("did you mean 'fixed-threshold'?",)),
        ({"policy": 1}, ("echo.policy: 1", ", ".join(POLICIES))),
        ({"policy": ["echo"]}, ('echo.policy: ["echo"]', ", ".join(POLICIES))),
        ({"kmax": 4}, ("echo.kmax: unknown key (did you mean 'k_max'?)",)),
        ({"model": "x"}, ("echo.model: stands too deep", 'beside "echo"')),
        ({"num_speculative_tokens": 4}, ("echo.num_speculative_tokens: stands too deep",)),
        ({"k_max": -3}, ("echo.k_max: -3 is out of range", "from 0", '"auto"')),
        ({"k_max": 2**31}, ("echo.k_max: 2147483648 is out of range", "to 2147483647")),
        ({"k_max": "automatic"}, ('echo.k_max: "automatic" is a text', '"auto"')),
        ({"k_max": "Auto"}, ('echo.k_max: "Auto" is a text', '"auto"')),
        ({"k_max": True}, ("echo.k_max: true is true or false",)),
        ({"k_max": 2.5}, ("echo.k_max: 2.5 is a number with a fraction",)),
        ({"k-max": 1, "k_max": 1}, ("echo.k_max: is given twice",)),
        ({"max_depth": 0}, ("echo.max_depth: 0 is out of range",)),
        ({"max_depth": 9}, ("echo.max_depth: 9 can never be reached", "num_speculative_tokens")),
        ({"target_depth": 7}, ("echo.target_depth: 7 lies beyond", "max_depth 6", "lower")),
        ({"target_depth": 0}, ("echo.target_depth: 0 is out of range",)),
        ({"top_k": 0}, ("echo.top_k: 0 is out of range",)),
        ({"threshold": 1.5}, ("echo.threshold: 1.5 is no probability", "from 0 to 1")),
        ({"threshold": NAN}, ("echo.threshold: NaN is no probability",)),
        ({"threshold": "0.3"}, ('echo.threshold: "0.3" is a text', "from 0 to 1")),
        ({"threshold": True}, ("echo.threshold: true is true or false",)),
        ({"transfer": 0}, ("echo.transfer: 0 is a number", "true or false")),
        ({"transfer": "false"}, ('echo.transfer: "false" is a text', "true or false")),
        ({"width": 1}, ("echo.width: 1 is a number", "true or false")),
        ({"watch_costs": "no"}, ('echo.watch_costs: "no" is a text', "true or false")),
        ({"widht": True}, ("echo.widht: unknown key (did you mean 'width'?)",)),
        ({"gates": {}}, ("echo.gates: {} is an object", "a list")),
        ({"gates": [3]}, ("echo.gates[0]: 3 is a number", "an object")),
        ({"gates": [{"depth": 0}]}, ("echo.gates[0].threshold: is missing",)),
        ({"gates": [{"threshold": 0.1}]}, ("echo.gates[0].depth: is missing",)),
        ({"gates": [{"depth": 0, "threshold": 0.1, "tau": 1}]}, ("echo.gates[0].tau: unknown",)),
    ],
)
def test_options(options: dict[str, Any], expected: tuple[str, ...]) -> None:
    message = refused(BASE | {"echo": options})
    assert all(part in message for part in expected), message


@pytest.mark.parametrize(
    ("policy", "named"), [("goodput", "echo.max_depth is 2"), ("chain", "echo.target_depth is 2")]
)
def test_a_calibration_of_deeper_trees_only_is_refused(policy: str, named: str) -> None:
    """Nothing would ever be drafted, and nobody would hear why."""
    supply = [[0.1, 4.0, 1.5, [0.8, 0.5]]]
    kind = CALIBRATION["greedy"] | {"supply": supply}
    options = {"policy": policy, "max_depth": 2, "calibration": {"greedy": kind, "sampled": kind}}
    message = refused(BASE | {"echo": options})
    assert "echo.calibration.greedy.supply: knows trees of depth 3 and more" in message
    assert named in message and "calibrate again" in message


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        ({"depth": 7}, ("depth: 7 lies beyond echo.max_depth 6", "from 0 to 6")),
        ({"depth": -1}, ("depth: -1 is out of range", "from 0 up")),
        ({"depth": "0"}, ('depth: "0" is a text',)),
        ({"depth": False}, ("depth: false is true or false",)),
        ({"depth": 0}, ("depth: 0 has a gate already, echo.gates[0]",)),
        ({"threshold": 1.01}, ("threshold: 1.01 is no probability", "from 0 to 1")),
        ({"threshold": -0.1}, ("threshold: -0.1 is no probability",)),
        ({"threshold": NAN}, ("threshold: NaN is no probability",)),
        ({"threshold": float("inf")}, ("threshold: Infinity is no probability",)),
        ({"threshold": "0.2"}, ('threshold: "0.2" is a text', "from 0 to 1")),
        ({"threshold": True}, ("threshold: true is true or false",)),
        ({"threshold": None}, ("threshold: null is null",)),
    ],
)
def test_gates_are_named_by_index(gate: dict[str, Any], expected: tuple[str, ...]) -> None:
    gates = [{"depth": 0, "threshold": 0.2}, {"depth": 1, "threshold": 0.3} | gate]
    message = refused(BASE | {"echo": {"gates": gates}})
    assert message.startswith("echo.gates[1]."), message
    assert all(part in message for part in expected), message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", ("is empty", '"method": "echo"')),
        (b" \n", ("is empty",)),
        (b'{"method": "echo",\n "model" "x"}', ("broken JSON at line 2, column 10",)),
        (b'{"method": "echo", "model": "x",}', ("broken JSON at line 1",)),
        (b"[1]", ("holds a list, not an object",)),
        (b'"echo"', ("holds a text, not an object",)),
        (b"\xff\xfe{", ("is not UTF-8 text",)),
        (b'{"method": "echo", "model": "a", "model": "b"}', ("'model' stands twice",)),
        (b'{"method": "echo", "echo": {"k_max": 1, "k_max": 2}}', ("'k_max' stands twice",)),
        (b"[" * 100_000, ("cannot be read",)),
        (b'{"a": ' + b"1" * 5000 + b"}", ("cannot be read",)),
    ],
)
def test_files_are_named(tmp_path: Path, content: bytes, expected: tuple[str, ...]) -> None:
    path = tmp_path / "echo.json"
    path.write_bytes(content)
    with pytest.raises(EchoConfigError) as caught:
        parse_speculative_config(str(path))
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert all(part in message for part in expected), message


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/no/such/echo.json", "there is no file '/no/such/echo.json'"),
        ("/tmp", "'/tmp' is a directory"),
        ("", "is a directory"),
        ("a\0b", "is no path"),
        ("~nobody-of-that-name/echo.json", "is no path"),
        ("/etc/passwd/echo.json", "cannot be read (Not a directory)"),
        ('{"method": "echo"', "broken JSON at line 1, column 18"),
        (7, "7 is a number; give inline JSON"),
    ],
)
def test_arguments_are_named(value: Any, expected: str) -> None:
    with pytest.raises(EchoConfigError) as caught:
        parse_speculative_config(value)
    assert expected in str(caught.value)
    assert str(caught.value).startswith("speculative_config")
