# SPDX-License-Identifier: Apache-2.0
"""The strict applier against difflib's diffs, and against diffs that must be refused."""

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_echo.errors import EchoPatchError
from vllm_echo.integration.unified_diff import apply_diff, parse_diff

LINES = st.lists(st.sampled_from(["", "a", "b", "-- a", "++ b", "@@ c"]), min_size=1, max_size=30)


def make_diff(old: str, new: str, context: int) -> str:
    lines = difflib.unified_diff(
        old.split("\n"), new.split("\n"), "a/x/y.py", "b/x/y.py", n=context, lineterm=""
    )
    return "What it is for\n\n" + "\n".join(lines) + "\n"


@given(LINES, LINES, st.integers(1, 3))
def test_applies_and_reverses_any_diff(old: list[str], new: list[str], context: int) -> None:
    before, after = "\n".join(old), "\n".join(new)
    if before == after:
        return
    (diff,) = parse_diff(make_diff(before, after, context), "test")
    assert diff.path == "x/y.py"
    assert apply_diff(before, diff) == after
    assert apply_diff(after, diff, reverse=True) == before


def test_stripped_blank_context_is_read() -> None:
    text = make_diff("a\n\nb", "a\n\nc", 3).replace("\n \n", "\n\n")
    assert apply_diff("a\n\nb", parse_diff(text, "test")[0]) == "a\n\nc"


def test_a_hunk_fits_its_line_or_not_at_all() -> None:
    (diff,) = parse_diff(make_diff("a\nb\nc", "a\nB\nc", 1), "test")
    for content in ("x\na\nb\nc", "a\nb ", "", "a\nB\nc"):
        with pytest.raises(EchoPatchError, match=r"x/y\.py: .*does not fit at line 1"):
            apply_diff(content, diff)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "only a description\n",
        "--- a/x.py\n+++ b/y.py\n@@ -1 +1 @@\n-a\n+b\n",
        "--- x.py\n+++ x.py\n@@ -1 +1 @@\n-a\n+b\n",
        "--- a/x.py\n+++ b/x.py\n",
        "--- a/x.py\n+++ b/x.py\n@@ -1,3 +1,3 @@\n-a\n+b\n",
        "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n*a\n+b\n",
    ],
)
def test_a_broken_patch_file_is_refused_by_name(text: str) -> None:
    with pytest.raises(EchoPatchError, match=r"^broken\.patch: "):
        parse_diff(text, "broken.patch")
