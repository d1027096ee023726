# SPDX-License-Identifier: Apache-2.0
"""Reading a speculative configuration: inline JSON or the path of a JSON file.

Only the JSON is judged here; what its keys mean is `config.py`'s business.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_echo.core.checks import check_type, kind
from vllm_echo.errors import EchoConfigError

METHOD = "echo"
_EXAMPLE = '{"method": "echo", "model": "<EAGLE-3 head>"}'
_HINT = f"give the path of a JSON file, or inline JSON such as {_EXAMPLE}"


def is_echo_request(raw: Any) -> bool:
    """Does this raw speculative configuration ask for echo?"""
    return isinstance(raw, Mapping) and raw.get("method") == METHOD


def parse_speculative_config(value: str | Mapping[str, Any]) -> dict[str, Any]:
    """Read inline JSON (a text that starts with '{'), a JSON file's path, or a mapping.

    Returns the raw dictionary. Raises EchoConfigError.
    """
    if isinstance(value, Mapping):
        return dict(value)
    check_type("speculative_config", value, str, "inline JSON, the path of a JSON file, or a dict")
    if value.strip().startswith("{"):
        return _parse_json(value, "speculative_config")
    return _parse_json(_read_file(value), f"speculative_config {value!r}")


def _read_file(path: str) -> str:
    where = f"speculative_config: {path!r}"
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise EchoConfigError(f"speculative_config: there is no file {path!r}; {_HINT}") from None
    except IsADirectoryError:
        raise EchoConfigError(f"{where} is a directory; {_HINT}") from None
    except UnicodeDecodeError as error:
        raise EchoConfigError(
            f"{where} is not UTF-8 text ({error.reason} at byte {error.start}); {_HINT}"
        ) from None
    except OSError as error:
        raise EchoConfigError(f"{where} cannot be read ({error.strerror}); {_HINT}") from None
    except (ValueError, RuntimeError) as error:  # a NUL in the path; "~nobody"
        raise EchoConfigError(f"{where} is no path ({error}); {_HINT}") from None


def _parse_json(text: str, source: str) -> dict[str, Any]:
    if not text.strip():
        raise EchoConfigError(f"{source}: is empty; write at least {_EXAMPLE}")
    duplicates: list[str] = []

    def keep_last(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        duplicates.extend(key for i, key in enumerate(keys) if key in keys[:i])
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=keep_last)
    except json.JSONDecodeError as error:
        raise EchoConfigError(
            f"{source}: broken JSON at line {error.lineno}, column {error.colno}: {error.msg}; "
            f"write it like {_EXAMPLE}"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits; endless nesting
        raise EchoConfigError(
            f"{source}: JSON that cannot be read ({error}); write it like {_EXAMPLE}"
        ) from None
    if not isinstance(value, dict):
        raise EchoConfigError(f"{source}: holds {kind(value)}, not an object; write {_EXAMPLE}")
    # For other methods JSON's usual rule stays, that the last one wins: vLLM has it so.
    if duplicates and is_echo_request(value):
        raise EchoConfigError(
            f"{source}: the key {duplicates[0]!r} stands twice in one object; keep one of them"
        )
    return value
