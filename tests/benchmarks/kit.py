# SPDX-License-Identifier: Apache-2.0
"""Made-up measurements, and a stand-in for a server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmarks.serving.engines import PLAIN, build_lineup
from benchmarks.serving.journal import Journal

ECHO_CONFIG = {
    "method": "echo",
    "model": "head",
    "num_speculative_tokens": 4,
    "echo": {"policy": "echo", "k_max": 32},
}
PROVENANCE = {
    "command": "python -m benchmarks.serving",
    "date": "2030-01-01T00:00:00+00:00",
    "commit": "c0ffee",
    "uncommitted_changes": None,
    "versions": {"python": "3.11"},
    "processor": "a processor",
    "usable_cores": 2,
    "memory_gib": 24.0,
}


def measurement(
    engine: str, concurrency: int, number: int, speed: float, **changes: Any
) -> dict[str, Any]:
    """One line of a journal."""
    speculates = engine not in PLAIN
    return {
        "group": 0,
        "round": number,
        "temperature": 0.0,
        "dataset": "mixed",
        "concurrency": concurrency,
        "engine": engine,
        "seconds": 1000 / speed,
        "output_tokens": 1000,
        "tokens": 1200,
        "tokens_per_second": speed,
        "every_tpot_ms": [1000 / speed] * 9 + [5000 / speed],
        "every_e2e_ms": [100000 / speed] * 10,
        "drafting": {
            "drafts": 100.0 * speculates,
            "drafted": 200.0 * speculates,
            "accepted": 80.0 * speculates,
            "steps": 200.0,
            "preemptions": 0.0,
        },
        "stages": {"steps": 50, "milliseconds_per_step": {"verify": 2.0}, "per_step": {}}
        if engine == "echo"
        else None,
        "busy_cores": {"server": 1.0, "idle_servers": 0.0, "others": 0.01},
        **changes,
    }


def journal_of(folder: Path, measurements: list[dict[str, Any]], **changes: Any) -> Journal:
    """A complete journal of these measurements."""
    lineup = build_lineup(ECHO_CONFIG)
    settings = {
        "model": "/models/small",
        "default": "echo",
        "engines": {e.name: {"server": e.server, "changes": e.options} for e in lineup.engines},
        "groups": [list(lineup.servers)],
        "skipped": dict(lineup.skipped),
        "dtype": "bfloat16",
        "output_tokens": 128,
        "output_limits": (64, 192),
        "mean_prompt_tokens": {"mixed": 50.0},
        **changes,
    }
    journal = Journal(folder)
    journal.begin(settings, PROVENANCE)
    for record in measurements:
        journal.add("measurement", record)
    journal.add("complete", {})
    return journal


class WordTokenizer:
    """A token is a word; a chat prompt has three more."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        start = len(self.words)
        self.words += text.split()
        return list(range(start, len(self.words)))

    def decode(self, tokens: Any) -> str:
        return " ".join(self.words[token] for token in tokens)

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        return [0, 0, 0, *self.encode(messages[0]["content"], add_special_tokens=False)]


def chat_app(answer: Callable[[web.Request], Any]) -> web.Application:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    return app
