# SPDX-License-Identifier: Apache-2.0
"""Chat, coding and instruction prompts composed from the word lists of ``composed_parts.py``."""

from __future__ import annotations

import random
from collections.abc import Callable

from composed_parts import (
    BROAD_TEMPLATES,
    CODE_TASKS,
    COMPARISONS,
    DATA_STRUCTURES,
    EVENTS,
    EXTRACTION_FORMS,
    FOLLOW_UPS,
    GENERAL_TEMPLATES,
    LANGUAGES,
    NAMES,
    PERSONAS,
    PLACES,
    PRODUCTS,
    QUESTIONS,
    STORIES,
    SURNAMES,
    TOPICS,
    WORDS,
)

Kinds = list[tuple[Callable[[random.Random], str], int]]


def composed_turns(rng: random.Random, count: int, kinds: Kinds) -> list[tuple[str, ...]]:
    """User turns of ``count`` distinct conversations, a third of them with two turns.

    Args:
        rng: of every choice.
        count: conversations to compose; fewer if the kinds do not give as many.
        kinds: ``BASE_KINDS`` or ``BROAD_KINDS``.
    """
    makers = [maker for maker, weight in kinds for _ in range(weight)]
    made: dict[str, tuple[str, ...]] = {}
    for _ in range(20 * count):
        if len(made) == count:
            break
        turns = [rng.choice(makers)(rng)]
        if rng.random() < 1 / 3:
            turns.append(rng.choice(FOLLOW_UPS))
        made.setdefault(turns[0], tuple(turns))
    return list(made.values())


def fill(rng: random.Random, template: str) -> str:
    """The template with an event or other parts of our word lists in its places."""
    return template.replace("{event}", rng.choice(EVENTS)).format(
        topic=rng.choice(TOPICS),
        name=rng.choice(NAMES),
        other=rng.choice(NAMES),
        surname=rng.choice(SURNAMES),
        place=rng.choice(PLACES),
        product=rng.choice(PRODUCTS),
        count=rng.choice(["three", "four", "five", "six"]),
        number=rng.randint(3, 900),
        age=rng.randint(18, 95),
        year=rng.randint(1850, 2050),
        words_list=", ".join(rng.sample(WORDS, rng.randint(3, 6))),
        sentence=_sentence(rng),
    )


def _instruction(rng: random.Random) -> str:
    return fill(rng, rng.choice(BROAD_TEMPLATES))


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


def _sentence(rng: random.Random) -> str:
    return _story(rng).split(". ")[0].rstrip(".") + "."


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
    sentence = _sentence(rng)
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


# Kinds of prompts, by mix, and how often each is drawn.
BASE_KINDS: Kinds = [
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
BROAD_KINDS: Kinds = [
    (_instruction, 12),
    (_from_template, 4),
    (_roleplay, 3),
    (_comparison, 1),
    (_extraction, 2),
    (_word_puzzle, 2),
    (_edit, 2),
]
