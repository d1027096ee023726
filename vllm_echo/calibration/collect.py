# SPDX-License-Identifier: Apache-2.0
"""Collecting draft traces in pieces that an interruption cannot take away.

A piece is the trace of one batch of prompts, a file of its own in the work folder. The folder
belongs to one set of inputs, named by a fingerprint: the same command goes on where it was
stopped, and another command does not mix in.
"""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from vllm_echo.cache import fingerprint
from vllm_echo.core.acceptance import KINDS
from vllm_echo.core.trace import DraftTrace
from vllm_echo.errors import EchoError


@dataclass(frozen=True)
class Piece:
    """One batch of prompts and how it is answered."""

    kind: str
    """One of ``KINDS``."""
    index: int
    questions: tuple[str, ...]

    @property
    def file_name(self) -> str:
        return f"{self.kind}-{self.index:04d}.npz"


def plan_pieces(questions: Sequence[str], batch: int) -> list[Piece]:
    """Greedy and sampled pieces in turn, so that an early stop leaves both."""
    batches = [tuple(questions[i : i + batch]) for i in range(0, len(questions), batch)]
    return [Piece(kind, i, b) for i, b in enumerate(batches) for kind in KINDS]


_NOTE = "inputs.json"
_OURS = (_NOTE, f"{_NOTE}.partial", *(f"{kind}-*.npz*" for kind in KINDS))
"""Files of a work folder; nothing else is ever removed."""


class WorkFolder:
    """Where pieces are kept until the calibration is written."""

    def __init__(self, path: Path, inputs: dict[str, Any]):
        """``inputs``: all that decides what a piece holds. Raises EchoError when the folder
        holds pieces of other inputs, or what is not ours."""
        self.path = path
        mark = {"fingerprint": fingerprint(inputs), "inputs": inputs}
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._check(mark)
            partial = path / f"{_NOTE}.partial"
            partial.write_text(json.dumps(mark, indent=2), encoding="utf-8")
            partial.replace(path / _NOTE)
        except OSError as error:
            raise EchoError(f"--work: {path} cannot be written ({error.strerror})") from None

    def _check(self, mark: dict[str, Any]) -> None:
        foreign = [file.name for file in self.path.iterdir() if not _is_ours(file)]
        if foreign:
            raise EchoError(
                f"--work: {self.path} holds other files ({min(foreign)}); name a new folder"
            )
        note = self.path / _NOTE
        if not note.is_file():
            return
        try:
            found = json.loads(note.read_text(encoding="utf-8"))
            inputs, known = dict(found["inputs"]), found["fingerprint"]
        except (ValueError, TypeError, KeyError):
            raise EchoError(f"--work: {note} cannot be read; remove {self.path}") from None
        if known != mark["fingerprint"]:
            now = mark["inputs"]
            changed = [k for k in {**inputs, **now} if inputs.get(k) != now.get(k)]
            raise EchoError(
                f"{self.path}: holds what was collected with other inputs ({', '.join(changed)}); "
                "remove the folder, or give the same options again to go on"
            )

    def has(self, piece: Piece) -> bool:
        return (self.path / piece.file_name).is_file()

    def save(self, piece: Piece, trace: DraftTrace) -> None:
        trace.save(self.path / piece.file_name)

    def load(self, kind: str, pieces: Sequence[Piece]) -> DraftTrace | None:
        """All pieces of a kind that are there, joined in order; None when there are none."""
        traces = [
            DraftTrace.load(self.path / piece.file_name)
            for piece in pieces
            if piece.kind == kind and self.has(piece)
        ]
        return DraftTrace.join(traces) if traces else None

    def remove(self) -> None:
        """Remove the pieces, and the folder when nothing else is in it."""
        for file in self.path.iterdir():
            if _is_ours(file):
                file.unlink()
        with suppress(OSError):
            self.path.rmdir()


def _is_ours(file: Path) -> bool:
    return any(fnmatch(file.name, pattern) for pattern in _OURS)


def collect(
    folder: WorkFolder,
    pieces: Sequence[Piece],
    record: Callable[[Piece], DraftTrace],
    progress: Callable[[int, int], None],
) -> None:
    """Record the pieces that are missing; ``progress`` hears (pieces done, pieces in all).

    An interrupt ends it with KeyboardInterrupt, at the end of a piece at the latest."""
    missing = [piece for piece in pieces if not folder.has(piece)]
    with _remembered_interrupt() as check:
        for piece in missing:
            progress(sum(folder.has(p) for p in pieces), len(pieces))
            folder.save(piece, record(piece))
            check()
    progress(len(pieces), len(pieces))


@contextmanager
def _remembered_interrupt() -> Iterator[Callable[[], None]]:
    """An interrupt is raised where it strikes. Python drops what is raised in a finaliser or a
    callback: what is yielded raises it again."""
    pressed: list[bool] = []

    def interrupt(*_: Any) -> None:
        pressed.append(True)
        raise KeyboardInterrupt

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
