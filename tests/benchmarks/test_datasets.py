# SPDX-License-Identifier: Apache-2.0
"""Reading, cutting and mixing questions."""

import json

import pytest

from benchmarks.serving import datasets
from benchmarks.serving.errors import BenchmarkError
from tests.benchmarks.kit import WordTokenizer


@pytest.mark.parametrize(
    "line",
    [{"prompt": "q"}, {"question": "q", "answer": "a"}, {"turns": ["q", "r"]}, {"text": "q"}],
)
def test_the_fields_of_the_usual_sets(line):
    assert datasets.question_of(line) == "q"


def test_the_projects_own_questions_without_a_folder():
    sets = datasets.load_sets(None)
    assert list(sets) == ["demo"]
    assert len(sets["demo"]) > 30


def test_a_folder_gives_the_sets_it_has_always_in_one_order(tmp_path):
    for name in ("gsm8k", "mt_bench", "other"):
        lines = [json.dumps({"question": f"{name} {i}"}) for i in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sets = datasets.load_sets(tmp_path)
    assert list(sets) == ["mt_bench", "gsm8k"]
    assert sets == datasets.load_sets(tmp_path)
    assert sorted(sets["gsm8k"]) == sorted(f"gsm8k {i}" for i in range(20))
    assert sets["gsm8k"] != [f"gsm8k {i}" for i in range(20)]


def test_wrong_folders_and_files_are_named(tmp_path):
    with pytest.raises(BenchmarkError, match="there is no folder"):
        datasets.load_sets(tmp_path / "missing")
    with pytest.raises(BenchmarkError, match="none of mt_bench.jsonl"):
        datasets.load_sets(tmp_path)
    path = tmp_path / "alpaca.jsonl"
    for content in ("{", '{"instruction": "q"}', "\n"):
        path.write_text(content)
        with pytest.raises(BenchmarkError, match="alpaca.jsonl"):
            datasets.load_sets(tmp_path)


def test_questions_that_are_too_long_lose_their_ends():
    long = " ".join(f"w{i}" for i in range(100))
    sets, mean = datasets.cut_to_fit({"a": ["two words", long]}, WordTokenizer(), 31)
    room = 31 - 3 - datasets.SLACK_TOKENS
    assert sets["a"] == ["two words", " ".join(f"w{i}" for i in range(room))]
    assert mean["a"] == (3 + 2 + 3 + room) / 2
    with pytest.raises(BenchmarkError, match="max-model-len"):
        datasets.cut_to_fit({"a": ["q"]}, WordTokenizer(), 11)


def test_mixed_sets_take_turns_and_begin_again():
    prompts = datasets.Prompts({"a": ["a0", "a1"], "b": ["b0", "b1", "b2"]})
    assert prompts.take(0, 7) == ["a0", "b0", "a1", "b1", "a0", "b2", "a1"]
    assert prompts.take(3, 2) == ["b1", "a0"]


def test_arrangements():
    sets = {"a": ["a0"], "b": ["b0"]}
    assert list(datasets.arrange(sets, by_dataset=False)) == ["mixed"]
    assert list(datasets.arrange(sets, by_dataset=True)) == ["a", "b"]
    assert list(datasets.arrange({"demo": ["q"]}, by_dataset=False)) == ["demo"]


def test_a_fingerprint_changes_with_a_question():
    assert datasets.fingerprint({"a": ["x"]}) != datasets.fingerprint({"a": ["y"]})
