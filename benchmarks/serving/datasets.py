# SPDX-License-Identifier: Apache-2.0
"""Prompts: the usual question sets, cut to what fits, and mixed evenly; and long prompts made of
them: solved questions of a set before one that is not, as few-shot prompts have them."""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol, cast

from benchmarks.serving.errors import BenchmarkError

SETS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm")
DEMO_PROMPTS = Path(__file__).resolve().parents[2] / "vllm_echo" / "demo" / "prompts.jsonl"
MIXED = "mixed"
LONG = "long"
LONG_SETS = ("humaneval", "gsm8k", "cnn_dm")
"""Those whose lines have solutions, and are not much shorter than a long prompt."""
LONG_TOKENS = (1500, 3000)
"""Of the shortest and the longest long prompts, the chat template apart."""
NUM_LONG = 96
SOLUTIONS = ("answer", "canonical_solution", "reference")
GOLDEN = 0.6180339887498949
SLACK_TOKENS = 8
"""Left free in a cut prompt: its text may come back from the tokenizer a little longer."""


class Tokenizer(Protocol):
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]: ...


@dataclass(frozen=True)
class Prompts:
    """Questions of one or several sets, each used as often as any other set's."""

    sets: Mapping[str, Sequence[str]]

    def starting_at(self, start: int) -> Iterator[str]:
        """Questions from number ``start`` on, one set after the other, without end; a set that is
        used up begins again."""
        names = list(self.sets)
        for number in count(start):
            questions = self.sets[names[number % len(names)]]
            yield questions[number // len(names) % len(questions)]


def load_lines(folder: Path | None) -> dict[str, list[dict[str, Any]]]:
    """The lines of every set, each with a question: those of ``folder``, else the project's own."""
    if folder is None:
        return {"demo": read_lines(DEMO_PROMPTS)}
    if not folder.is_dir():
        raise BenchmarkError(f"--data: there is no folder {folder}")
    found = {name: folder / f"{name}.jsonl" for name in SETS}
    found = {name: path for name, path in found.items() if path.is_file()}
    if not found:
        files = ", ".join(f"{name}.jsonl" for name in SETS)
        raise BenchmarkError(f"--data: {folder} has none of {files}")
    return {name: read_lines(path) for name, path in found.items()}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A JSONL file in an order that is always the same."""
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if text.strip():
            try:
                lines.append(json.loads(text))
                question_of(lines[-1])
            except (ValueError, KeyError, IndexError) as error:
                raise BenchmarkError(f"{path}, line {number}: {error}") from None
    if not lines:
        raise BenchmarkError(f"{path} has no lines")
    random.Random(path.stem).shuffle(lines)
    return lines


def question_of(line: Mapping[str, Any]) -> str:
    """The first turn."""
    for key in ("prompt", "question", "turns", "text"):
        if key in line:
            return line[key] if isinstance(line[key], str) else line[key][0]
    raise ValueError(f"needs one of prompt, question, turns, text; has {sorted(line)}")


def solution_of(line: Mapping[str, Any]) -> str:
    """What stands in the set as the first turn's answer; "" where nothing does."""
    value = next((line[key] for key in SOLUTIONS if line.get(key)), "")
    text = value if isinstance(value, str) else value[0]
    return text.strip("\n").rstrip()


def long_prompts(
    sets: Mapping[str, Sequence[Mapping[str, Any]]], tokenizer: Tokenizer
) -> list[str]:
    """``NUM_LONG`` prompts, or none where no set has solutions: a set's solved questions, as many
    as reach a length that is spread over ``LONG_TOKENS``, and then one of its questions. Always the
    same of the same lines; a prompt's own solution is in none of it."""
    shots = {
        name: [(question_of(line), solution_of(line)) for line in sets[name] if solution_of(line)]
        for name in LONG_SETS
        if name in sets
    }
    shots = {name: solved for name, solved in shots.items() if len(solved) > 1}
    if not shots:
        return []
    names = list(shots)
    least, most = LONG_TOKENS
    prompts = []
    for number in range(NUM_LONG):
        solved = shots[names[number % len(names)]]
        wanted = least + (most - least) * (GOLDEN * number % 1)
        prompts.append(_few_shot(solved, number // len(names), wanted, tokenizer))
    return prompts


def _few_shot(
    solved: Sequence[tuple[str, str]], first: int, wanted: float, tokenizer: Tokenizer
) -> str:
    """Question number ``first`` after those that follow it, up to ``wanted`` tokens in all."""
    asked = solved[first % len(solved)][0].strip()
    left = wanted - len(tokenizer.encode(asked, add_special_tokens=False))
    shots: list[str] = []
    for step in range(1, len(solved)):
        question, solution = solved[(first + step) % len(solved)]
        text = f"{question.strip()}\n\n{solution}"
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) > left:
            shots.append(tokenizer.decode(tokens[-int(left) :]) if left >= 1 else "")
            break
        shots.append(text)
        left -= len(tokens)
    return "\n\n\n".join([*filter(None, reversed(shots)), asked])


def cut_to_fit(
    sets: Mapping[str, Sequence[str]], tokenizer: Tokenizer, most_tokens: int
) -> tuple[dict[str, list[str]], dict[str, float]]:
    """The questions, their ends cut where a chat prompt would have more than ``most_tokens``; and
    each set's mean prompt tokens."""
    template = tokenizer.apply_chat_template(
        [{"role": "user", "content": ""}], add_generation_prompt=True, return_dict=False
    )
    room = most_tokens - len(template) - SLACK_TOKENS
    if room < 1:
        raise BenchmarkError(f"no prompt fits into {most_tokens} tokens; raise --max-model-len")
    cut: dict[str, list[str]] = {}
    mean = {}
    for name, questions in sets.items():
        cut[name], lengths = [], []
        for question in questions:
            tokens = tokenizer.encode(question, add_special_tokens=False)
            fits = len(tokens) <= room
            cut[name].append(question if fits else tokenizer.decode(tokens[:room]))
            lengths.append(len(template) + min(len(tokens), room))
        mean[name] = sum(lengths) / len(lengths)
    return cut, mean


def arrange(sets: Mapping[str, Sequence[str]], by_dataset: bool) -> dict[str, Prompts]:
    """What is measured apart: every set, or all of them mixed."""
    if by_dataset:
        return {name: Prompts({name: questions}) for name, questions in sets.items()}
    return {MIXED if len(sets) > 1 else next(iter(sets)): Prompts(sets)}


def fingerprint(sets: Mapping[str, Sequence[str]]) -> str:
    """Changes when a question does."""
    return hashlib.sha256(json.dumps(sets, sort_keys=True).encode()).hexdigest()[:16]


def load_tokenizer(model: str) -> Tokenizer:
    """The model's own."""
    from transformers import AutoTokenizer

    try:
        return cast(Tokenizer, AutoTokenizer.from_pretrained(model))
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"--model: {str(error).strip().splitlines()[0]}") from None
