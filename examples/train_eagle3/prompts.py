# SPDX-License-Identifier: Apache-2.0
"""Training prompts: published question sets from a data folder, and prompts composed here.

Every prompt is a conversation plan: a list of user turns, answered one after the other by the
target itself. All choices are drawn from one seeded generator, so the same seed and the same data
folder give the same list. No evaluation set is read.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composed_parts import (
    CODE_TASKS,
    COMPARISONS,
    DATA_STRUCTURES,
    EXTRACTION_FORMS,
    FOLLOW_UPS,
    FUNCTION_SPECS,
    GENERAL_TEMPLATES,
    LANGUAGES,
    NAMES,
    PERSONAS,
    PLACES,
    PRODUCTS,
    QUESTIONS,
    STORIES,
    TOPICS,
    WORDS,
)

# Share of the answer tokens that each group should have, and the mean answer tokens (both turns)
# that the demo target was seen to give; together they set how densely a group's items are placed.
TOKEN_SHARES = {"maths": 0.41, "code": 0.29, "chat": 0.30}
MEAN_TOKENS = {"maths": 215, "code": 185, "chat": 350}


@dataclass(frozen=True)
class Conversation:
    """User turns to be answered, and the name of the set that they come from."""

    source: str
    turns: tuple[str, ...]

    @property
    def key(self) -> str:
        """A stable identifier of the turns, 16 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.turns).encode()).hexdigest()[:16]


def training_conversations(data: Path, seed: int, general: int) -> list[Conversation]:
    """All conversations in an order of which any prefix is a fair mix.

    Args:
        data: folder with gsm8k_train.jsonl, mbpp.jsonl and self_instruct.jsonl.
        seed: of every random choice.
        general: how many chat and coding conversations to compose.

    Returns:
        Distinct conversations. As long as no group is used up, the answers' tokens are split
        among the groups as ``TOKEN_SHARES`` says.
    """
    rng = random.Random(seed)
    maths = [Conversation("gsm8k", (row["question"],)) for row in _rows(data, "gsm8k_train.jsonl")]
    code = list(_mbpp(_rows(data, "mbpp.jsonl"), rng)) + list(_function_completions(rng))
    chat = list(_self_instruct(_rows(data, "self_instruct.jsonl")))
    chat += _composed(rng, general)
    return list(_interleaved({"maths": maths, "code": code, "chat": chat}, rng))


def _rows(data: Path, name: str) -> list[dict[str, Any]]:
    with (data / name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _interleaved(
    groups: dict[str, list[Conversation]], rng: random.Random
) -> Iterator[Conversation]:
    """Shuffles each group, then merges the groups by their shares; repeated turns are left out."""
    placed: list[tuple[float, Conversation]] = []
    for name, group in groups.items():
        rng.shuffle(group)
        spacing = MEAN_TOKENS[name] / TOKEN_SHARES[name]
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


def _composed(rng: random.Random, count: int) -> list[Conversation]:
    """``count`` distinct conversations of the kinds below, a third of them with two turns."""
    kinds: list[tuple[Callable[[random.Random], str], int]] = [
        (_from_template, 9),
        (_question, 3),
        (_roleplay, 3),
        (_comparison, 2),
        (_coding_request, 5),
        (_summary, 2),
        (_extraction, 2),
        (_arithmetic, 2),
        (_word_puzzle, 2),
        (_edit, 2),
        (_short_answer, 2),
    ]
    makers = [maker for maker, weight in kinds for _ in range(weight)]
    made: dict[str, Conversation] = {}
    for _ in range(20 * count):
        if len(made) == count:
            break
        turns = [rng.choice(makers)(rng)]
        if rng.random() < 1 / 3:
            turns.append(rng.choice(FOLLOW_UPS))
        made.setdefault(turns[0], Conversation("composed", tuple(turns)))
    return list(made.values())


def _from_template(rng: random.Random) -> str:
    template = rng.choice(GENERAL_TEMPLATES)
    return template.format(
        topic=rng.choice(TOPICS),
        name=rng.choice(NAMES),
        place=rng.choice(PLACES),
        product=rng.choice(PRODUCTS),
        count=rng.choice(["three", "four", "five", "six", "ten"]),
        words=rng.choice([50, 80, 100, 150, 200]),
    )


def _question(rng: random.Random) -> str:
    return rng.choice(["", "", "Briefly: ", "In your own words: "]) + rng.choice(QUESTIONS)


def _roleplay(rng: random.Random) -> str:
    persona = rng.choice(PERSONAS)
    frame = rng.choice(
        [
            "You are {p}. Stay in character and tell me what you think about {t}.",
            "Pretend to be {p}. A visitor asks you about {t}. What do you say?",
            "Speak as {p} would, and explain {t} to a beginner.",
            "Take the part of {p}. Start a conversation with me about {t}.",
            "As {p}, write a short letter to a friend about {t}.",
        ]
    )
    return frame.format(p=persona, t=rng.choice(TOPICS))


def _comparison(rng: random.Random) -> str:
    first, second = rng.choice(COMPARISONS)
    frame = rng.choice(
        [
            "What are the main differences between {a} and {b}?",
            "Compare {a} with {b}. When would you choose one over the other?",
            "Explain the advantages and disadvantages of {a} and {b} in a short table or list.",
            "Which is better for a beginner, {a} or {b}? Give reasons.",
        ]
    )
    return frame.format(a=first, b=second)


def _coding_request(rng: random.Random) -> str:
    frame = rng.choice(
        [
            "Write a {lang} program that {task}.",
            "Write a {lang} function that {task}. Explain how it works.",
            "How would you write code in {lang} that {task}?",
            "Implement {structure} in {lang} with the usual operations.",
            "Write a Python function that {task}. Add a docstring and two examples.",
            "Write a Python function that {task}.",
            "Write unit tests for a Python function that {task}.",
            "Explain how {structure} works, and what its operations cost.",
        ]
    )
    return frame.format(
        lang=rng.choice(LANGUAGES),
        task=rng.choice(CODE_TASKS),
        structure=rng.choice(DATA_STRUCTURES),
    )


def _story(rng: random.Random) -> str:
    """A short factual-sounding passage of two to five composed sentences."""
    sentences = rng.sample(STORIES, rng.randint(2, 5))
    filled = [
        text.format(
            name=rng.choice(NAMES),
            other=rng.choice(NAMES),
            place=rng.choice(PLACES),
            product=rng.choice(PRODUCTS),
            number=rng.randint(3, 900),
            year=rng.randint(1950, 2024),
        )
        for text in sentences
    ]
    return " ".join(filled)


def _summary(rng: random.Random) -> str:
    frame = rng.choice(
        [
            "Summarise the following text in one sentence:\n\n{text}",
            "Summarize this passage for a busy reader:\n\n{text}",
            "{text}\n\nWhat is the main point of the text above?",
            "Give a title to this text and list its key points.\n\n{text}",
            "Rewrite the following text in simpler words:\n\n{text}",
        ]
    )
    return frame.format(text=_story(rng))


def _extraction(rng: random.Random) -> str:
    return rng.choice(EXTRACTION_FORMS).format(text=_story(rng))


def _arithmetic(rng: random.Random) -> str:
    a, b, c = rng.randint(2, 60), rng.randint(2, 40), rng.randint(2, 12)
    name, other = rng.choice(NAMES), rng.choice(NAMES)
    frame = rng.choice(
        [
            "What is {a} + {b} * {c}? Show each step.",
            "Solve for x: {c}x + {b} = {a}.",
            "{name} has {a} apples and gives {c} to {other}. How many are left?",
            "A shop sells pens at ${c} each. How much do {b} pens cost?",
            "A train travels {a} km in {c} hours. What is its average speed?",
            "What is the area of a rectangle of {a} cm by {b} cm?",
            "If a bag holds {b} red and {c} blue balls, what is the probability to draw a red one?",
            "Find the next two numbers of the sequence {c}, {b}, {a} and explain your rule.",
            "Given f(x) = {c}x^2 - {b}x + 1, find f({c}).",
            "{name} is {c} years older than {other}, who is {b}. How old is {name}?",
            "What is {c} percent of {a}?",
        ]
    )
    return frame.format(a=a + b, b=b, c=c, name=name, other=other)


def _word_puzzle(rng: random.Random) -> str:
    words = rng.sample(WORDS, 4)
    names = rng.sample(NAMES, 3)
    frame = rng.choice(
        [
            "Which word does not belong with the others: {w0}, {w1}, {w2}, {w3}? Why?",
            "Put these words in alphabetical order: {w0}, {w1}, {w2}, {w3}.",
            "{n0} is taller than {n1}. {n1} is taller than {n2}. Who is the shortest, and why?",
            "Use the words {w0}, {w1} and {w2} in one sentence.",
            "Write a two-line rhyme about {w0} and {w1}.",
            "Write a haiku about {w0}.",
            "{n0} sits left of {n1}, and {n2} sits right of {n1}. Who sits in the middle?",
            "If all {w0}s are {w1}s and some {w1}s are {w2}s, are all {w0}s {w2}s? Explain.",
            "Make up a short fable in which a {w0} meets a {w1}.",
        ]
    )
    filled = {f"w{i}": word for i, word in enumerate(words)}
    filled |= {f"n{i}": name for i, name in enumerate(names)}
    return frame.format(**filled)


def _edit(rng: random.Random) -> str:
    frame = rng.choice(
        [
            "Correct the grammar and spelling: {text}",
            "Translate the following sentence into {tongue}: {text}",
            "Rewrite this in a more formal tone: {text}",
            "Turn the following into a bullet list: {text}",
            "Is the tone of this sentence positive, neutral or negative? {text}",
            "Rewrite the following sentence in the passive voice: {text}",
        ]
    )
    sentence = _story(rng).split(". ")[0].rstrip(".") + "."
    tongue = rng.choice(["French", "Spanish", "German", "Italian"])
    return frame.format(text=sentence, tongue=tongue)


def _short_answer(rng: random.Random) -> str:
    frame = rng.choice(
        [
            "Give me one interesting fact about {t}.",
            "In one sentence, what is {t}?",
            "Name {n} things connected with {t}.",
            "True or false: most people know little about {t}. Explain in a sentence.",
            "What is the first thing to learn about {t}?",
            "Which book would you suggest to someone interested in {t}?",
        ]
    )
    return frame.format(t=rng.choice(TOPICS), n=rng.choice(["three", "four", "five"]))
