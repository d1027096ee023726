# SPDX-License-Identifier: Apache-2.0
"""Interrupted runs go on, complete ones are put aside."""

import pytest

from benchmarks.serving.errors import BenchmarkError
from benchmarks.serving.journal import Journal

SETTINGS = {"model": "m", "concurrency": (1, 4)}


def interrupted(folder) -> Journal:
    journal = Journal(folder)
    journal.begin(SETTINGS, {"date": "first"})
    journal.add("measurement", {"engine": "none", "round": 0})
    return journal


def test_an_interrupted_run_goes_on(tmp_path):
    interrupted(tmp_path)
    journal = Journal(tmp_path)
    journal.begin(SETTINGS, {"date": "second"})
    journal.add("measurement", {"engine": "none", "round": 1})
    again = Journal(tmp_path)
    assert [m["round"] for m in again.measurements] == [0, 1]
    assert [s["date"] for s in again.sessions] == ["first", "second"]
    assert not again.complete


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = interrupted(tmp_path).path
    path.write_text(path.read_text() + '{"kind": "measurement", "eng')
    journal = Journal(tmp_path)
    journal.begin(SETTINGS, {})
    journal.add("measurement", {"engine": "none", "round": 1})
    assert [m["round"] for m in Journal(tmp_path).measurements] == [0, 1]


def test_other_settings_do_not_mix(tmp_path):
    interrupted(tmp_path)
    with pytest.raises(BenchmarkError, match=r"\(model\).*--fresh"):
        Journal(tmp_path).begin({**SETTINGS, "model": "n"}, {})


def test_a_complete_run_is_put_aside(tmp_path):
    interrupted(tmp_path).add("complete", {})
    journal = Journal(tmp_path)
    assert journal.complete
    journal.begin({**SETTINGS, "model": "n"}, {})
    assert not journal.measurements
    assert not Journal(tmp_path).complete
    assert len(list(tmp_path.glob("results-until-*.jsonl"))) == 1


def test_what_was_measured_otherwise_is_not_reported(tmp_path):
    """Catches an old folder's numbers under a text that describes the present method."""
    path = interrupted(tmp_path).path
    Journal(tmp_path).require_format()
    path.write_text(path.read_text().replace('"format": 2, ', ""))
    journal = Journal(tmp_path)
    with pytest.raises(BenchmarkError, match="measured otherwise; measure again"):
        journal.require_format()
    with pytest.raises(BenchmarkError, match=r"\(format\).*--fresh"):
        journal.begin(SETTINGS, {})


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "results.jsonl").write_text('nonsense\n{"kind": "complete"}\n')
    with pytest.raises(BenchmarkError, match="line 1"):
        Journal(tmp_path)


def test_git_ignores_the_folder(tmp_path):
    interrupted(tmp_path)
    assert (tmp_path / ".gitignore").read_text() == "*\n"
