# SPDX-License-Identifier: Apache-2.0
"""Training prompts: published question sets, prompts composed here, and questions by the target.

Every prompt is a conversation plan: a list of user turns, answered one after the other by the
target itself. Two mixes of them exist: "base" is maths, code and chat; "broad" is what the base mix
has little of, namely questions that the target wrote (``self_written.py``), texts by the target
with requests to summarise them, and instructions. All choices are drawn from one seeded generator,
so the same seed and the same files give the same list. No evaluation set is read.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composed import BASE_KINDS, BROAD_KINDS, Kinds, composed_turns, fill
from composed_parts import ARTICLE_FORMS, FUNCTION_SPECS, SUMMARY_FORMS

# Share of the answer tokens that each group should have, by mix, and the mean answer tokens (all
# turns) that the demo target was seen to give; together they set how densely a group is placed.
TOKEN_SHARES = {
    "base": {"maths": 0.41, "code": 0.29, "chat": 0.30},
    "broad": {"questions": 0.42, "articles": 0.36, "instructions": 0.22},
}
MEAN_TOKENS = {
    "maths": 215,
    "code": 185,
    "chat": 350,
    "questions": 230,
    "articles": 520,
    "instructions": 330,
}


@dataclass(frozen=True)
class Conversation:
    """User turns to be answered, and the name of the set that they come from.

    If ``quoting`` is set, the first answer is a text to be talked about: it is sampled at
    ``temperature``, and every later turn opens a chat of its own that quotes it in place of
    ``{text}``.
    """

    source: str
    turns: tuple[str, ...]
    quoting: bool = False
    temperature: float = 0.0  # of the first answer; 0 is greedy
    max_tokens: int | None = None  # of the first answer, if it is not the usual limit

    @property
    def key(self) -> str:
        """A stable identifier of the turns, 16 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.turns).encode()).hexdigest()[:16]


def training_conversations(
    data: Path, seed: int, general: int, mix: str = "base", questions: Path | None = None
) -> list[Conversation]:
    """All conversations in an order of which any prefix is a fair mix.

    Args:
        data: folder with gsm8k_train.jsonl, mbpp.jsonl and self_instruct.jsonl.
        seed: of every random choice.
        general: how many chat and coding conversations to compose.
        mix: "base" or "broad".
        questions: file of ``self_written.py``, for the broad mix.

    Returns:
        Distinct conversations. As long as no group is used up, the answers' tokens are split
        among the groups as ``TOKEN_SHARES`` says.
    """
    chat = list(_self_instruct(_rows(data, "self_instruct.jsonl")))
    if mix == "broad":
        rng = random.Random(f"{seed}/broad")
        written = _rows(questions.parent, questions.name) if questions else []
        groups = {
            "questions": [Conversation("magpie", (row["question"],)) for row in written],
            "articles": _articles(rng, general),
            "instructions": chat + _composed(rng, general, BROAD_KINDS),
        }
    else:
        rng = random.Random(seed)
        rows = _rows(data, "gsm8k_train.jsonl")
        code = list(_mbpp(_rows(data, "mbpp.jsonl"), rng)) + list(_function_completions(rng))
        groups = {
            "maths": [Conversation("gsm8k", (row["question"],)) for row in rows],
            "code": code,
            "chat": chat + _composed(rng, general, BASE_KINDS),
        }
    return list(_interleaved(groups, TOKEN_SHARES[mix], rng))


def _rows(data: Path, name: str) -> list[dict[str, Any]]:
    with (data / name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _interleaved(
    groups: dict[str, list[Conversation]], shares: dict[str, float], rng: random.Random
) -> Iterator[Conversation]:
    """Shuffles each group, then merges the groups by their shares; repeated turns are left out."""
    placed: list[tuple[float, Conversation]] = []
    for name, group in groups.items():
        rng.shuffle(group)
        spacing = MEAN_TOKENS[name] / shares[name]
        placed += [((i + rng.random()) * spacing, item) for i, item in enumerate(group)]
    seen: set[str] = set()
    for _, item in sorted(placed, key=lambda pair: pair[0]):
        if item.key not in seen:
            seen.add(item.key)
            yield item


# --- code ---------------------------------------------------------------------------------------


def _mbpp(rows: Iterable[dict[str, Any]], rng: random.Random) -> Iterator[Conversation]:
    """Three prompts for each task: as a request, with its tests, and as a function to complete."""
    for row in rows:
        task = row["text"].strip()
        tests = [test.replace("\r", "").strip() for test in row["test_list"]]
        yield Conversation("mbpp_request", (task,))
        with_tests = f"{task} Your code should pass these tests:\n\n" + "\n".join(tests)
        yield Conversation("mbpp_tests", (with_tests,))
        if completion := _mbpp_completion(task, row["code"], tests, rng):
            yield Conversation("mbpp_complete", (completion,))


def _mbpp_completion(task: str, code: str, tests: list[str], rng: random.Random) -> str | None:
    """The signature of the tested function with the task as its docstring."""
    called = re.match(r"assert\s+\(?\s*(\w+)\s*\(", tests[0]) if tests else None
    if called is None:
        return None
    name = called.group(1)
    signature = re.search(rf"^def\s+{name}\s*\([^)]*\)", code.replace("\r", ""), re.MULTILINE)
    if signature is None:
        return None
    doc = re.sub(r"^Write an? (?:python )?function (?:to |that |which )?", "", task, flags=re.I)
    doc = doc[:1].upper() + doc[1:]
    examples = "".join(_doctest(test, name) for test in tests[: rng.randint(0, 3)])
    imports = rng.choice(["", "", "from typing import List\n\n\n", "import math\n\n\n"])
    return f'{imports}{signature.group(0)}:\n    """ {doc}\n{examples}    """\n'


def _doctest(test: str, name: str) -> str:
    """A doctest line pair from ``assert name(args) == value``, or nothing if it differs."""
    match = re.fullmatch(rf"assert\s+({name}\(.*\))\s*==\s*(.+)", test)
    return f"    >>> {match.group(1)}\n    {match.group(2)}\n" if match else ""


def _function_completions(rng: random.Random) -> Iterator[Conversation]:
    """Signature and docstring of functions of our own, in several layouts."""
    leads = [
        "",
        "Complete the following Python function.\n\n",
        "Finish this function:\n\n",
        "Please implement the function below. Return only the code.\n\n",
    ]
    for signature, doc, example in FUNCTION_SPECS:
        call, value = example
        bodies = [
            f'def {signature}:\n    """\n    {doc}\n    >>> {call}\n    {value}\n    """\n',
            f'def {signature}:\n    """{doc}"""\n',
            f"def {signature}:\n    '''{doc}\n    For example, {call} should return {value}.\n"
            "    '''\n",
        ]
        head = "from typing import List\n\n\n" if "List" in signature else "\n"
        for body in bodies:
            yield Conversation("completion", (rng.choice(leads) + head + body,))


# --- chat ---------------------------------------------------------------------------------------


def _self_instruct(rows: Iterable[dict[str, Any]]) -> Iterator[Conversation]:
    for row in rows:
        given = row["instances"][0]["input"].strip() if row["instances"] else ""
        prompt = f"{row['instruction'].strip()}\n\n{given}" if given else row["instruction"].strip()
        yield Conversation("self_instruct", (prompt,))


def _composed(rng: random.Random, count: int, kinds: Kinds) -> list[Conversation]:
    return [Conversation("composed", turns) for turns in composed_turns(rng, count, kinds)]


def _articles(rng: random.Random, count: int) -> list[Conversation]:
    """Requests for news and other texts, each with a request to summarise what was written."""
    made: dict[str, Conversation] = {}
    for _ in range(count):
        request = fill(rng, rng.choice(ARTICLE_FORMS))
        turns = (request, rng.choice(SUMMARY_FORMS))
        made[request] = Conversation(
            "article",
            turns,
            quoting=True,
            temperature=rng.choice([0.6, 0.8]),
            max_tokens=rng.choice([250, 350, 450, 600, 900]),
        )
    return list(made.values())


def quotation(text: str, complete: bool, one_line: bool) -> str:
    """A text as a user would paste it.

    Args:
        text: as the target wrote it.
        complete: whether it came to its end; if not, the last, torn sentence is left out.
        one_line: whether to drop its line breaks.
    """
    if not complete and (end := max(text.rfind(mark) for mark in ".!?")) > 0:
        text = text[: end + 1]
    return " ".join(text.split()) if one_line else text.strip()
