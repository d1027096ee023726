# SPDX-License-Identifier: Apache-2.0
"""The prompt file that `calibrate` and `profile` read: JSON lines with a question each."""

import json
from pathlib import Path

from vllm_echo.errors import EchoError

FIELDS = ("prompt", "question", "turns", "instruction", "text")


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """The questions, from the first of ``FIELDS`` that a line has; the first of several turns.

    Raises EchoError, naming the line.
    """
    try:
        # Not splitlines: JSON allows the other line ends of Unicode inside a text.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise EchoError(f"--prompts: {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise EchoError(f"--prompts: {path} is not UTF-8 text") from None
    questions = [
        _question(json_line, f"--prompts: {path}, line {number}")
        for number, json_line in enumerate(lines, start=1)
        if json_line.strip()
    ]
    if not questions:
        raise EchoError(f'--prompts: {path} is empty; write lines such as {{"prompt": "..."}}')
    return questions[:limit]


def _question(line: str, where: str) -> str:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        raise EchoError(f"{where}: is no JSON object") from None
    if not isinstance(content, dict):
        raise EchoError(f"{where}: is no JSON object")
    for field in FIELDS:
        value = content.get(field)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, str) and value.strip():
            return value
    raise EchoError(f"{where}: has none of the fields {', '.join(FIELDS)} with a text")
