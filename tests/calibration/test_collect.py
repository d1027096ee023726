# SPDX-License-Identifier: Apache-2.0
"""Collecting in pieces: what an interruption leaves, what goes on, and what does not mix."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.calibration.kit import draft_trace, platt
from vllm_echo.calibration.collect import Piece, WorkFolder, collect, plan_pieces
from vllm_echo.core.acceptance import KINDS
from vllm_echo.core.trace import DraftTrace
from vllm_echo.errors import EchoError

QUESTIONS = [f"question {i}" for i in range(7)]
INPUTS = {"model": "a", "draft": "b", "max_depth": 3, "seed": 0}


def trace_of(piece: Piece) -> DraftTrace:
    seed = piece.index + 100 * KINDS.index(piece.kind)
    return draft_trace(platt((0.0, 1.0)), len(piece.questions), 4, seed=seed)


def same(one: DraftTrace, other: DraftTrace) -> bool:
    names = [f.name for f in dataclasses.fields(DraftTrace)]
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


class Recording:
    """Records pieces, and is interrupted at the ``fails_at``-th."""

    def __init__(self, fails_at: int | None = None, error: type[BaseException] = KeyboardInterrupt):
        self.pieces: list[Piece] = []
        self._fails_at, self._error = fails_at, error

    def __call__(self, piece: Piece) -> DraftTrace:
        if len(self.pieces) == self._fails_at:
            raise self._error
        self.pieces.append(piece)
        return trace_of(piece)


def silent(done: int, total: int) -> None:
    pass


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 40), st.integers(1, 20))
def test_every_prompt_is_asked_once_of_each_kind(count: int, batch: int) -> None:
    questions = [f"{i}" for i in range(count)]
    pieces = plan_pieces(questions, batch)
    for kind in KINDS:
        mine = [piece for piece in pieces if piece.kind == kind]
        assert [question for piece in mine for question in piece.questions] == questions
        assert [piece.index for piece in mine] == list(range(len(mine)))
        assert all(len(piece.questions) <= batch for piece in mine)
    assert len({piece.file_name for piece in pieces}) == len(pieces)


def test_kinds_take_turns() -> None:
    """An early stop leaves some of both."""
    assert [piece.kind for piece in plan_pieces(QUESTIONS, 3)] == [*KINDS] * 3


@pytest.mark.parametrize("stop", range(6))
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_costs_one_piece(
    tmp_path: Path, stop: int, error: type[BaseException]
) -> None:
    """Catches pieces that are written at the end, and ones that are asked again."""
    pieces = plan_pieces(QUESTIONS, 3)
    folder = WorkFolder(tmp_path / "work", INPUTS)
    first = Recording(stop, error)
    with pytest.raises(error):
        collect(folder, pieces, first, silent)
    assert first.pieces == pieces[:stop]
    assert [folder.has(piece) for piece in pieces] == [i < stop for i in range(6)]

    again = Recording()
    collect(WorkFolder(tmp_path / "work", INPUTS), pieces, again, silent)
    assert again.pieces == pieces[stop:]

    whole = WorkFolder(tmp_path / "whole", INPUTS)
    collect(whole, pieces, Recording(), silent)
    for kind in KINDS:
        resumed, unbroken = folder.load(kind, pieces), whole.load(kind, pieces)
        assert resumed is not None
        assert unbroken is not None
        assert same(resumed, unbroken)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_is_not_lost(tmp_path: Path) -> None:
    """What strikes in a finaliser is printed and forgotten: the run would go on to its end."""

    class Finalised:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    recording = Recording()

    def record(piece: Piece) -> DraftTrace:
        if len(recording.pieces) == 2:
            Finalised()
        return recording(piece)

    pieces = plan_pieces(QUESTIONS, 3)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        collect(WorkFolder(tmp_path, INPUTS), pieces, record, silent)
    assert recording.pieces == pieces[:3], "the piece that it struck in was finished"
    assert signal.getsignal(signal.SIGINT) is before


def test_nothing_is_recorded_twice(tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path, INPUTS)
    pieces = plan_pieces(QUESTIONS, 3)
    collect(folder, pieces, Recording(), silent)
    collect(folder, pieces, Recording(fails_at=0), silent)


def test_progress_counts_what_was_there(tmp_path: Path) -> None:
    """Catches a bar that begins at 0 again, or never reaches its end."""
    pieces = plan_pieces(QUESTIONS, 3)
    folder = WorkFolder(tmp_path, INPUTS)
    with pytest.raises(KeyboardInterrupt):
        collect(folder, pieces, Recording(2), silent)
    heard: list[tuple[int, int]] = []
    collect(folder, pieces, Recording(), lambda done, total: heard.append((done, total)))
    assert heard == [(2, 6), (3, 6), (4, 6), (5, 6), (6, 6)]


def test_a_half_written_piece_is_not_taken(tmp_path: Path) -> None:
    """A process that was killed leaves a partial file: the piece is recorded again."""
    pieces = plan_pieces(QUESTIONS, 3)
    folder = WorkFolder(tmp_path, INPUTS)
    (tmp_path / f"{pieces[0].file_name}.partial").write_bytes(b"half")
    assert not folder.has(pieces[0])
    assert folder.load("greedy", pieces) is None
    recording = Recording()
    collect(WorkFolder(tmp_path, INPUTS), pieces, recording, silent)
    assert recording.pieces == pieces
    folder.remove()
    assert not tmp_path.exists()


def test_pieces_of_a_kind_join_in_order_whatever_is_missing(tmp_path: Path) -> None:
    pieces = plan_pieces(QUESTIONS, 3)
    folder = WorkFolder(tmp_path, INPUTS)
    for piece in reversed(pieces):
        if piece.index != 1:
            folder.save(piece, trace_of(piece))
    loaded = folder.load("sampled", pieces)
    expected = [trace_of(p) for p in pieces if p.kind == "sampled" and p.index != 1]
    assert loaded is not None
    assert same(loaded, DraftTrace.join(expected))
    assert loaded.num_requests == 3 + 1


@pytest.mark.parametrize(
    ("inputs", "changed"),
    [
        ({**INPUTS, "seed": 1}, "(seed)"),
        ({**INPUTS, "model": "c", "max_depth": 4}, "(model, max_depth)"),
        ({**INPUTS, "later": 1}, "(later)"),
        ({k: v for k, v in INPUTS.items() if k != "draft"}, "(draft)"),
    ],
)
def test_pieces_of_other_inputs_are_not_mixed_in(
    tmp_path: Path, inputs: dict[str, object], changed: str
) -> None:
    """Catches a refusal that leaves the reader to find out what differs."""
    folder = WorkFolder(tmp_path / "work", INPUTS)
    piece = plan_pieces(QUESTIONS, 3)[0]
    folder.save(piece, trace_of(piece))
    with pytest.raises(EchoError) as raised:
        WorkFolder(tmp_path / "work", inputs)
    message = str(raised.value)
    assert changed in message
    assert "remove the folder, or give the same options again" in message
    assert WorkFolder(tmp_path / "work", INPUTS).has(piece), "the refusal changes nothing"


def test_what_is_not_ours_is_neither_used_nor_removed(tmp_path: Path) -> None:
    """Catches `--work ~` and all of it gone at the end."""
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(EchoError, match=r"^--work: .* holds other files \(thesis.txt\); name"):
        WorkFolder(tmp_path, INPUTS)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]

    folder = WorkFolder(tmp_path / "work", INPUTS)
    piece = plan_pieces(QUESTIONS, 3)[0]
    folder.save(piece, trace_of(piece))
    (folder.path / "notes.txt").write_text("put there meanwhile")
    folder.remove()
    assert [file.name for file in folder.path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("note", ["", "{", "[]", '{"inputs": 3, "fingerprint": "x"}', "{}"])
def test_a_note_that_cannot_be_read_is_said(tmp_path: Path, note: str) -> None:
    (tmp_path / "inputs.json").write_text(note)
    with pytest.raises(EchoError, match=r"^--work: .*inputs\.json cannot be read; remove"):
        WorkFolder(tmp_path, INPUTS)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "work"):
        with pytest.raises(EchoError, match=r"^--work: .* cannot be written \("):
            WorkFolder(path, INPUTS)


def test_the_note_is_whole_or_not_there(tmp_path: Path) -> None:
    """An interruption while it is written does not lock the folder."""
    (tmp_path / "inputs.json.partial").write_text('{"fing')
    folder = WorkFolder(tmp_path, INPUTS)
    assert json.loads((tmp_path / "inputs.json").read_text())["inputs"] == INPUTS
    folder.remove()
    assert not tmp_path.exists()
