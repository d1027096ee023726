# SPDX-License-Identifier: Apache-2.0
"""A strict applier of unified diffs: every hunk fits its place exactly, or nothing is changed.

No fuzz, no search, no tool of the system: the patches of this project apply to files whose hashes
are known, so anything but an exact fit is a mistake.
"""

import re
from dataclasses import dataclass

from vllm_echo.errors import EchoPatchError

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Hunk:
    """One place of a file, with its lines before and after; lines are counted from 1."""

    old_line: int
    new_line: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class FileDiff:
    """The hunks for one file; `path` is relative to the folder that holds the package."""

    path: str
    hunks: tuple[Hunk, ...]


def parse_diff(text: str, source: str) -> list[FileDiff]:
    """Read a patch file (`-p1` paths). Text before the first `---` line is its description."""
    lines = text.split("\n")
    diffs: list[FileDiff] = []
    index = 0
    while index < len(lines):
        if not lines[index].startswith("--- "):
            index += 1
            continue
        path = _read_path(lines, index, source)
        index += 2
        hunks: list[Hunk] = []
        while index < len(lines) and (match := _HUNK.match(lines[index])):
            hunk, index = _read_hunk(lines, index + 1, match, source)
            hunks.append(hunk)
        if not hunks:
            raise EchoPatchError(f"{source}: no hunk for {path} (line {index + 1})")
        diffs.append(FileDiff(path, tuple(hunks)))
    if not diffs:
        raise EchoPatchError(f"{source}: holds no diff")
    return diffs


def apply_diff(content: str, diff: FileDiff, *, reverse: bool = False) -> str:
    """The content after all hunks; raises EchoPatchError when one does not fit exactly."""
    lines = content.split("\n")
    # From the last hunk up: the lines above a hunk are then still where its header counts them.
    for hunk in reversed(diff.hunks):
        line, old, new = hunk.old_line, hunk.old, hunk.new
        if reverse:
            line, old, new = hunk.new_line, hunk.new, hunk.old
        if tuple(lines[line - 1 : line - 1 + len(old)]) != old:
            raise EchoPatchError(f"{diff.path}: the patch does not fit at line {line}")
        lines[line - 1 : line - 1 + len(old)] = new
    return "\n".join(lines)


def _read_path(lines: list[str], index: int, source: str) -> str:
    """The path of a `--- a/PATH` line and the `+++ b/PATH` line after it, which must agree."""
    old = lines[index][4:].split("\t")[0]
    following = lines[index + 1] if index + 1 < len(lines) else ""
    new = following[4:].split("\t")[0]
    if not following.startswith("+++ ") or old[:2] != "a/" or new != f"b/{old[2:]}":
        raise EchoPatchError(f"{source}: line {index + 1} is no `--- a/PATH`, `+++ b/PATH` pair")
    return old[2:]


def _read_hunk(
    lines: list[str], index: int, header: re.Match[str], source: str
) -> tuple[Hunk, int]:
    num_old, num_new = (1 if count is None else int(count) for count in header.group(2, 4))
    old: list[str] = []
    new: list[str] = []
    while len(old) < num_old or len(new) < num_new:
        line = lines[index] if index < len(lines) else None
        # Editors strip the blank that stands for an empty line of context.
        kind, text = (line[:1] or " ", line[1:]) if line is not None else ("", "")
        if kind not in (" ", "-", "+"):
            raise EchoPatchError(f"{source}: line {index + 1} breaks off a hunk")
        if kind != "+":
            old.append(text)
        if kind != "-":
            new.append(text)
        index += 1
    return Hunk(int(header[1]), int(header[3]), tuple(old), tuple(new)), index
