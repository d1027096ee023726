# SPDX-License-Identifier: Apache-2.0
"""The echo.json that is written into: what stays, what is refused, and when."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_echo.calibration import echo_file
from vllm_echo.calibration.echo_file import check_writable, read_echo_file, write_echo_file
from vllm_echo.core.acceptance import uncalibrated
from vllm_echo.core.config import EchoConfig
from vllm_echo.errors import EchoConfigError, EchoError

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=30,
)


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(values)
def test_compact_lists_are_the_same_json(value: Any) -> None:
    """Catches brackets and digits inside texts that glue lines together wrongly."""
    text = json.dumps(value, indent=2)
    assert json.loads(echo_file._compact_lists(text)) == value


def test_numbers_stand_in_one_line() -> None:
    text = json.dumps({"a": [1, [2.5, -3]], "b": [{"c": 1}], "d": []}, indent=2)
    assert echo_file._compact_lists(text).splitlines() == [
        "{",
        '  "a": [1, [2.5, -3]],',
        '  "b": [',
        "    {",
        '      "c": 1',
        "    }",
        "  ],",
        '  "d": []',
        "}",
    ]


def test_a_new_file_is_for_the_head_that_is_named(tmp_path: Path) -> None:
    path = tmp_path / "new" / "echo.json"
    assert read_echo_file(path, "head") == {"method": "echo", "model": "head", "echo": {}}
    assert not path.parent.exists(), "reading makes nothing"
    with pytest.raises(EchoError, match=r"^--draft: is missing, and there is no .*echo\.json that"):
        read_echo_file(path, None)


def test_what_is_there_and_not_ours_stays(tmp_path: Path) -> None:
    """Catches keys that are lost, and depths that are put back to the defaults."""
    path = tmp_path / "echo.json"
    content = {
        "method": "echo",
        "model": "head",
        "num_speculative_tokens": 12,
        "revision": "main",
        "echo": {"policy": "goodput", "k_max": 40, "max_depth": 5, "transfer": False},
    }
    write(path, content)
    for draft in ("head", None):
        read = read_echo_file(path, draft)
        assert read == content
        read["echo"]["calibration"] = uncalibrated().to_dict()
        write_echo_file(path, read)
        written = json.loads(path.read_text())
        assert written.pop("echo").pop("calibration") == uncalibrated().to_dict()
        assert written == {key: value for key, value in content.items() if key != "echo"}
        write(path, content)


def test_keys_with_dashes_and_nulls_are_read_as_the_server_reads_them(tmp_path: Path) -> None:
    """Catches a key that then stands there twice, once in each spelling, or a null that is taken
    for a number: both would come out only when everything is measured."""
    path = tmp_path / "echo.json"
    write(path, {"method": "echo", "model": "head", "num-speculative-tokens": 4, "echo": None})
    assert read_echo_file(path, None) == {
        "method": "echo",
        "model": "head",
        "num_speculative_tokens": 4,
        "echo": {},
    }
    write(path, {"method": "echo", "model": "head", "echo": {"max-depth": 3, "top_k": None}})
    assert read_echo_file(path, None)["echo"] == {"max_depth": 3}


def test_another_head_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "echo.json"
    write(path, {"method": "echo", "model": "one"})
    with pytest.raises(EchoConfigError, match=r"^--draft: 'other', but .* is for the head 'one'"):
        read_echo_file(path, "other")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('{"method": "echo"', "broken JSON"),
        ("[1]", "not an object"),
        ('{"method": "eagle3", "model": "head"}', "method"),
        ('{"method": "echo"}', "model: is missing"),
        ('{"method": "echo", "model": "head", "echo": {"kmax": 3}}', "echo.kmax: unknown key"),
        ('{"method": "echo", "model": "head", "echo": {"k_max": -1}}', "echo.k_max"),
    ],
)
def test_a_file_that_could_not_be_served_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "echo.json"
    path.write_text(text)
    with pytest.raises(EchoConfigError, match=message):
        read_echo_file(path, None)
    assert path.read_text() == text


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.1, "0.5"])
def test_refused_content_leaves_the_old_file(tmp_path: Path, bad: object) -> None:
    """Catches a file that is opened for writing before its content is judged."""
    path = tmp_path / "echo.json"
    write(path, {"method": "echo", "model": "head"})
    before = path.read_bytes()
    gates = [{"depth": 0, "threshold": bad}]
    with pytest.raises(EchoConfigError, match=r"^echo\.gates\[0\]\.threshold"):
        write_echo_file(path, {"method": "echo", "model": "head", "echo": {"gates": gates}})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["echo.json"]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_does_not_have_are_refused(tmp_path: Path, number: float) -> None:
    calibration = uncalibrated().to_dict()
    calibration["sampled"]["curves"][0][0] = number
    content = {"method": "echo", "model": "head", "echo": {"calibration": calibration}}
    with pytest.raises(EchoConfigError, match="no finite number"):
        write_echo_file(tmp_path / "echo.json", content)
    assert os.listdir(tmp_path) == []


def test_a_written_file_is_served(tmp_path: Path) -> None:
    """And makes the folder that it is to be in."""
    path = tmp_path / "deep" / "er" / "echo.json"
    content = {"method": "echo", "model": "höhe", "echo": {"k_max": 3}}
    write_echo_file(path, content)
    assert EchoConfig.from_speculative_config(read_echo_file(path, "höhe")).k_max == 3
    assert path.read_text().endswith("}\n")
    assert os.listdir(path.parent) == ["echo.json"]


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """By who asks early, and by who writes all the same."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "echo.json", tmp_path / "file" / "a" / "echo.json"):
        with pytest.raises(EchoError, match=r"^--output: .* cannot be written"):
            check_writable(path)
        with pytest.raises(EchoError, match=r"^--output: .* cannot be written \("):
            write_echo_file(path, {"method": "echo", "model": "head"})
    check_writable(tmp_path / "new" / "folder" / "echo.json")
    check_writable(Path("echo.json"))
    assert not (tmp_path / "new").exists()


def test_a_folder_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked of the system, since root may write everywhere."""
    asked: list[Path] = []

    def access(path: Path, mode: int) -> bool:
        asked.append(path)
        return mode != os.W_OK

    monkeypatch.setattr(os, "access", access)
    with pytest.raises(EchoError, match=r"^--output: .* cannot be written; name another file$"):
        check_writable(tmp_path / "new" / "echo.json")
    assert asked == [tmp_path]
