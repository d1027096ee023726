# SPDX-License-Identifier: Apache-2.0
"""Prompts: the usual question sets, cut to what fits, and mixed evenly."""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from benchmarks.serving.errors import BenchmarkError

SETS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm")
DEMO_PROMPTS = Path(__file__).resolve().parents[2] / "vllm_echo" / "demo" / "prompts.jsonl"
MIXED = "mixed"
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

    def take(self, start: int, count: int) -> list[str]:
        """``count`` questions from number ``start`` on, one set after the other; a set that is
        used up begins again."""
        names = list(self.sets)
        chosen = []
        for number in range(start, start + count):
            questions = self.sets[names[number % len(names)]]
            chosen.append(questions[number // len(names) % len(questions)])
        return chosen


def load_sets(folder: Path | None) -> dict[str, list[str]]:
    """Questions by set: those of ``folder``, else the project's own."""
    if folder is None:
        return {"demo": read_questions(DEMO_PROMPTS)}
    if not folder.is_dir():
        raise BenchmarkError(f"--data: there is no folder {folder}")
    found = {name: folder / f"{name}.jsonl" for name in SETS}
    found = {name: path for name, path in found.items() if path.is_file()}
    if not found:
        files = ", ".join(f"{name}.jsonl" for name in SETS)
        raise BenchmarkError(f"--data: {folder} has none of {files}")
    return {name: read_questions(path) for name, path in found.items()}


def read_questions(path: Path) -> list[str]:
    """The question of every line of a JSONL file, in an order that is always the same."""
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                questions.append(question_of(json.loads(line)))
            except (ValueError, KeyError, IndexError) as error:
                raise BenchmarkError(f"{path}, line {number}: {error}") from None
    if not questions:
        raise BenchmarkError(f"{path} has no lines")
    random.Random(path.stem).shuffle(questions)
    return questions


def question_of(line: Mapping[str, Any]) -> str:
    """The first turn."""
    for key in ("prompt", "question", "turns", "text"):
        if key in line:
            return line[key] if isinstance(line[key], str) else line[key][0]
    raise ValueError(f"needs one of prompt, question, turns, text; has {sorted(line)}")


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
