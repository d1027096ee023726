# SPDX-License-Identifier: Apache-2.0
"""Reading, cutting and mixing questions."""

import json
from itertools import islice

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
    sets = datasets.load_lines(None)
    assert list(sets) == ["demo"]
    assert len(sets["demo"]) > 30


def test_a_folder_gives_the_sets_it_has_always_in_one_order(tmp_path):
    for name in ("gsm8k", "mt_bench", "other"):
        lines = [json.dumps({"question": f"{name} {i}"}) for i in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sets = datasets.load_lines(tmp_path)
    assert list(sets) == ["mt_bench", "gsm8k"]
    assert sets == datasets.load_lines(tmp_path)
    asked = [datasets.question_of(line) for line in sets["gsm8k"]]
    assert sorted(asked) == sorted(f"gsm8k {i}" for i in range(20))
    assert asked != [f"gsm8k {i}" for i in range(20)]


def test_wrong_folders_and_files_are_named(tmp_path):
    with pytest.raises(BenchmarkError, match="there is no folder"):
        datasets.load_lines(tmp_path / "missing")
    with pytest.raises(BenchmarkError, match="none of mt_bench.jsonl"):
        datasets.load_lines(tmp_path)
    path = tmp_path / "alpaca.jsonl"
    for content in ("{", '{"instruction": "q"}', "\n"):
        path.write_text(content)
        with pytest.raises(BenchmarkError, match="alpaca.jsonl"):
            datasets.load_lines(tmp_path)


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
    first = list(islice(prompts.starting_at(0), 7))
    assert first == ["a0", "b0", "a1", "b1", "a0", "b2", "a1"]
    assert list(islice(prompts.starting_at(3), 2)) == ["b1", "a0"]


SOLVED = {
    "humaneval": [
        {"prompt": f"p{i} " * 100, "canonical_solution": f"\n    s{i} " * 60} for i in range(40)
    ],
    "gsm8k": [{"question": f"q{i} " * 60, "answer": f"a{i} " * 120} for i in range(40)],
    "mt_bench": [{"turns": ["t", "u"], "reference": ["r"]}] * 40,
}


def test_long_prompts_are_solved_questions_before_one_that_is_not():
    prompts = datasets.long_prompts(SOLVED, WordTokenizer())
    assert prompts == datasets.long_prompts(SOLVED, WordTokenizer())
    lengths = [len(prompt.split()) for prompt in prompts]
    least, most = datasets.LONG_TOKENS
    assert least - 1 <= min(lengths) < least + 50 and most - 50 < max(lengths) <= most
    assert len(set(prompts)) == len(prompts) == datasets.NUM_LONG
    for number, prompt in enumerate(prompts):
        kind, solution = ("p", "s") if number % 2 == 0 else ("q", "a")
        asked = prompt.split()[-1]
        assert asked == f"{kind}{number // 2 % 40}"
        assert asked.replace(kind, solution) not in prompt.split()  # its own is not given away
        assert f"{solution}{(number // 2 + 1) % 40}" in prompt.split()
        assert not {"t", "r"} & set(prompt.split())  # too short to make long ones of


def test_there_are_no_long_prompts_without_solutions():
    assert datasets.long_prompts({"demo": [{"prompt": "q"}]}, WordTokenizer()) == []
    assert datasets.long_prompts({"gsm8k": SOLVED["gsm8k"][:1]}, WordTokenizer()) == []


def test_a_solution_keeps_its_indentation():
    assert datasets.solution_of({"canonical_solution": "\n    return 1\n\n"}) == "    return 1"
    assert datasets.solution_of({"reference": ["first", "second"]}) == "first"
    assert datasets.solution_of({"answer": ""}) == ""


def test_arrangements():
    sets = {"a": ["a0"], "b": ["b0"]}
    assert list(datasets.arrange(sets, by_dataset=False)) == ["mixed"]
    assert list(datasets.arrange(sets, by_dataset=True)) == ["a", "b"]
    assert list(datasets.arrange({"demo": ["q"]}, by_dataset=False)) == ["demo"]


def test_a_fingerprint_changes_with_a_question():
    assert datasets.fingerprint({"a": ["x"]}) != datasets.fingerprint({"a": ["y"]})
