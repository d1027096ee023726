# SPDX-License-Identifier: Apache-2.0
"""Prompt files: what is read, and what a wrong one is told."""

import json
from pathlib import Path

import pytest

from vllm_echo.cache import fingerprint
from vllm_echo.calibration.prompts import FIELDS, read_prompts
from vllm_echo.errors import EchoError


def written(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_read(tmp_path: Path, field: str) -> None:
    lines = [json.dumps({"id": 1, field: "why?"}), json.dumps({field: ["first", "second"]})]
    assert read_prompts(written(tmp_path, "\n".join(lines))) == ["why?", "first"]


def test_the_first_field_with_a_text_counts(tmp_path: Path) -> None:
    """Catches an empty or numeric field that hides the question."""
    line = json.dumps(
        {"text": "last", "prompt": " ", "question": 7, "turns": [], "instruction": "i"}
    )
    assert read_prompts(written(tmp_path, line)) == ["i"]


def test_the_limit_takes_the_first(tmp_path: Path) -> None:
    path = written(tmp_path, "".join(f'{{"prompt": "{i}"}}\n\n' for i in range(5)))
    assert read_prompts(path) == ["0", "1", "2", "3", "4"]
    assert read_prompts(path, 2) == ["0", "1"]
    assert read_prompts(path, 9) == ["0", "1", "2", "3", "4"]


def test_a_file_as_editors_on_windows_write_it(tmp_path: Path) -> None:
    path = written(tmp_path, '\ufeff{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert read_prompts(path) == ["a", "b"]


def test_line_ends_of_unicode_may_stand_in_a_text(tmp_path: Path) -> None:
    """JSON lets them stand as they are, and texts from the web are full of them. Catches
    str.splitlines."""
    texts = ["a\u2028b", "a\u2029b", "a\x85b", "plain"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    assert read_prompts(written(tmp_path, "\n".join(lines))) == texts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r'is empty; write lines such as \{"prompt": "..."\}$'),
        ("\n \n", r"is empty; write lines"),
        ('{"prompt": "a"}\n\n{"prompt": ', r", line 3: is no JSON object$"),
        ('{"prompt": "a"}\n["b"]', r", line 2: is no JSON object$"),
        ("[" * 100_000, r", line 1: is no JSON object$"),
        (
            '{"prompt": "a"}\n{"answer": "b"}',
            r", line 2: has none of the fields prompt, question, turns, instruction, text with a ",
        ),
        ('{"prompt": [{"role": "user"}]}', r", line 1: has none of the fields"),
    ],
)
def test_a_broken_file_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(EchoError, match=r"^--prompts: .*prompts\.jsonl.*" + message):
        read_prompts(written(tmp_path, text))


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(EchoError, match=r"^--prompts: .*none cannot be read \(No such file"):
        read_prompts(tmp_path / "none")
    with pytest.raises(EchoError, match=r"^--prompts: .* cannot be read \(Is a directory"):
        read_prompts(tmp_path)


def test_a_file_in_another_encoding_is_said(tmp_path: Path) -> None:
    with pytest.raises(EchoError, match=r"^--prompts: .* is not UTF-8 text$"):
        read_prompts(written(tmp_path, '{"prompt": "é"}', "latin-1"))


def test_a_fingerprint_tells_values_apart_and_not_their_order() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert (
        len({fingerprint(value) for value in ({"a": 1}, {"a": "1"}, {"a": None}, [], ["a"])}) == 5
    )
