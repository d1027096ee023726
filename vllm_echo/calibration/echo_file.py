# SPDX-License-Identifier: Apache-2.0
"""The echo.json that `calibrate` and `profile` write into: what is there and not theirs stays."""

import json
import os
from pathlib import Path
from typing import Any

from vllm_echo.core.config import METHOD, EchoConfig, normalise_keys
from vllm_echo.core.config_file import parse_speculative_config
from vllm_echo.errors import EchoConfigError, EchoError


def read_echo_file(path: Path, draft: str | None) -> dict[str, Any]:
    """The content of ``path``, or a new one for the head ``draft``. Raises EchoError."""
    if not path.exists():
        if draft is None:
            raise EchoError(f"--draft: is missing, and there is no {path} that names a head")
        return {"method": METHOD, "model": draft, "echo": {}}
    content = parse_speculative_config(str(path))
    EchoConfig.from_speculative_config(content)
    content = _without_nulls(normalise_keys(content))
    content["echo"] = _without_nulls(normalise_keys(content.get("echo", {}), "echo."))
    if draft is not None and content["model"] != draft:
        raise EchoConfigError(
            f"--draft: {draft!r}, but {path} is for the head {content['model']!r}; give that "
            "head, or another --output"
        )
    return content


def write_echo_file(path: Path, content: dict[str, Any]) -> None:
    """Check ``content`` and write it, at once or not at all."""
    EchoConfig.from_speculative_config(content)
    text = _compact_lists(json.dumps(content, indent=2, allow_nan=False)) + "\n"
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise EchoError(f"--output: {path} cannot be written ({error.strerror})") from None


def check_writable(path: Path) -> None:
    """Raise EchoError now rather than after an hour of measuring."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise EchoError(f"--output: {path} cannot be written; name another file")


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """A null stands for the default, as a key that is left out does."""
    return {key: value for key, value in values.items() if value is not None}


def _compact_lists(text: str) -> str:
    """Put lists of plain numbers on one line: [1, 2.5] instead of four lines."""
    lines: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        inside = lines and lines[-1].count("[") > lines[-1].count("]")
        if inside and stripped[:1] in "-0123456789[]":
            glue = "" if lines[-1].endswith("[") or stripped.startswith("]") else " "
            lines[-1] += glue + stripped
        else:
            lines.append(line)
    return "\n".join(lines)
