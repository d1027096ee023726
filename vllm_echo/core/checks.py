# SPDX-License-Identifier: Apache-2.0
"""Checks of single values, and the words in which a wrong one is refused.

Every message is one line: the key with its path, the value, what is wrong, what would be right.
"""

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_echo.errors import EchoConfigError

_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a number",
    float: "a number with a fraction",
    str: "a text",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def check_int(path: str, value: Any, low: int, high: int | None, meaning: str) -> None:
    """Refuse what is not a whole number within [low, high]; a bool is no number."""
    right = f"a whole number from {low}" + (" up" if high is None else f" to {high}")
    if not is_int(value):
        raise EchoConfigError(f"{path}: {show(value)} is {kind(value)}; give {right} ({meaning})")
    if value < low or (high is not None and value > high):
        raise EchoConfigError(f"{path}: {show(value)} is out of range; give {right} ({meaning})")


def check_probability(path: str, value: Any, right: str) -> None:
    """Refuse what is not a number within [0, 1]."""
    if not (is_int(value) or isinstance(value, float)):
        raise EchoConfigError(f"{path}: {show(value)} is {kind(value)}; give {right}")
    if not _is_finite(value) or not 0 <= value <= 1:
        raise EchoConfigError(f"{path}: {show(value)} is no probability; give {right}")


def check_number(path: str, value: Any, meaning: str, low: float = -math.inf) -> None:
    """Refuse what is not a finite number of at least ``low``."""
    if not (is_int(value) or isinstance(value, float)) or not _is_finite(value):
        raise EchoConfigError(f"{path}: {show(value)} is no finite number; give {meaning}")
    if value < low:
        raise EchoConfigError(f"{path}: {show(value)} is below {low}; give {meaning}")


def check_numbers(path: str, value: Any, count: int, meaning: str, low: float = -math.inf) -> None:
    """Refuse what is not a list of ``count`` finite numbers of at least ``low``."""
    check_type(path, value, (list, tuple), meaning)
    if len(value) != count:
        raise EchoConfigError(f"{path}: has {len(value)} values; give {meaning}")
    for number in value:
        check_number(path, number, meaning, low)


def check_keys(
    path: str,
    value: Mapping[str, Any],
    names: Iterable[str],
    remedy: str,
    optional: Iterable[str] = (),
) -> None:
    """Refuse keys that nobody knows, and missing ones that are not ``optional``."""
    names = list(names)
    for key in value:
        if key not in names:
            raise unknown_key(f"{path}.{key}", str(key), names)
    for name in names:
        if name not in value and name not in optional:
            raise EchoConfigError(f"{path}.{name}: is missing; {remedy}")


def check_type(path: str, value: Any, expected: type | tuple[type, ...], right: str) -> None:
    """Refuse what is not an instance of `expected`; `right` says what to give instead."""
    if not isinstance(value, expected):
        raise EchoConfigError(f"{path}: {show(value)} is {kind(value)}; give {right}")


def unknown_key(path: str, key: str, allowed: Iterable[str]) -> EchoConfigError:
    """The error for a key that nobody knows."""
    names = list(allowed)
    return EchoConfigError(
        f"{path}: unknown key{did_you_mean(key, names)}; known are {', '.join(names)}"
    )


def did_you_mean(word: Any, choices: Iterable[str]) -> str:
    """The closest choice as a question in brackets, or nothing."""
    close = difflib.get_close_matches(str(word), list(choices), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _is_finite(value: int | float) -> bool:
    """JSON has whole numbers of any length; Python's float has not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_int(value: Any) -> bool:
    """A whole number in JSON's sense: Python's bool does not count."""
    return isinstance(value, int) and not isinstance(value, bool)


def kind(value: Any) -> str:
    """What a value is, in JSON's terms."""
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def show(value: Any) -> str:
    """The value as JSON would have it, cut short so that the message stays one line."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
