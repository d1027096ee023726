# SPDX-License-Identifier: Apache-2.0
"""How soon does a server with a wrong cost curve come back to plain decoding's speed?

    .venv/bin/python -m benchmarks.cost_curve.spoilt [--data FOLDER]

Two servers, plain decoding and echo, take turns; the other one is halted. Echo measures its own
curve when it starts. For every curve that is made of it, and every load, it serves for a minute
under that curve, and then both are measured in turns. Prints what echo gave in the first minute and
afterwards, in tokens a second over plain decoding's. Nothing else should run.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.cost_curve import add_pair, pair_of
from benchmarks.serving.client import Load, send
from benchmarks.serving.datasets import Prompts, load_lines, question_of
from benchmarks.serving.fleet import Fleet, free_ports
from benchmarks.serving.servers import MODEL_NAME, Server, Serving
from vllm_echo.core.cost import CostCurve, Line

FIRST_SECONDS = 60.0
BAR = 0.97
SERVER_BYTES = 2 << 30
ENDLESS = 1_000_000


def scaled(curve: CostCurve, factor: float) -> CostCurve:
    """``curve`` with candidates that cost ``factor`` times as much, rows and drafting."""

    def times(line: Line) -> Line:
        return Line(factor * line.fixed, factor * line.each)

    (first, ms), *_ = curve.step
    assert first == 1
    return replace(
        curve,
        step=tuple((rows, ms + factor * (each - ms)) for rows, each in curve.step),
        roots=times(curve.roots),
        layer=times(curve.layer),
        catch_up=times(curve.catch_up),
        control=times(curve.control),
        node_context_us=factor * curve.node_context_us,
    )


def flat(curve: CostCurve) -> CostCurve:
    """``curve`` of a machine to which rows are free."""
    ms = curve.step_ms(1)
    return replace(curve, step=tuple((rows, ms) for rows, _ in curve.step), node_context_us=0.0)


CURVES: Mapping[str, Callable[[CostCurve], CostCurve]] = {
    "its own": lambda curve: curve,
    "flat": flat,
    "ten times too dear": lambda curve: scaled(curve, 10.0),
    "ten times too cheap": lambda curve: scaled(curve, 0.1),
}


@dataclass
class Pair:
    """The two servers, and what they are asked."""

    plain: Server
    echo: Server
    prompts: Prompts
    tokens: int
    asked: int = 0
    first_minutes: dict[int, float] = field(default_factory=dict)
    """Of plain decoding, by requests at a time."""

    def rate(self, server: Server, concurrency: int, requests: int, seconds: float | None) -> float:
        """Tokens a second until so many ``requests`` are answered, or the time is over. A turn is a
        number of answers: in a number of seconds the faster server would begin more prompts."""
        questions = self.prompts.starting_at(self.asked)
        load = Load(questions, requests, concurrency, self.tokens, 0.0, self.asked, seconds)
        server.go_on()
        try:
            result = send(server.url, MODEL_NAME, load)
            server.settle()
        finally:
            server.halt()
        return result["tokens_per_second"]

    def first_minute(self, concurrency: int) -> float:
        """Echo's, as a share of plain decoding's first minute under the same load."""
        self.asked = 0
        found = self.rate(self.echo, concurrency, ENDLESS, FIRST_SECONDS)
        if concurrency not in self.first_minutes:
            plain = self.rate(self.plain, concurrency, ENDLESS, FIRST_SECONDS)
            self.first_minutes[concurrency] = plain
        return found / self.first_minutes[concurrency]

    def turns(self, concurrency: int, requests: int, turns: int) -> list[float]:
        """Echo's rates over plain decoding's, by turn."""
        ratios = []
        for turn in range(turns):
            self.asked += requests
            order = (self.plain, self.echo) if turn % 2 else (self.echo, self.plain)
            rates = {s.name: self.rate(s, concurrency, requests, None) for s in order}
            ratios.append(rates[self.echo.name] / rates[self.plain.name])
        return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_pair(parser)
    parser.add_argument("--data", type=Path, help="a folder of question sets")
    parser.add_argument("--curves", nargs="+", choices=list(CURVES), default=list(CURVES))
    parser.add_argument("--loads", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--requests", type=float, nargs=2, default=[8, 1.5], metavar=("LEAST", "PER_SLOT")
    )
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, on average")
    options = parser.parse_args()
    model, config = pair_of(parser, options)
    folder = Path(tempfile.mkdtemp(prefix="spoilt-curves-"))
    lines = load_lines(options.data)
    prompts = Prompts({name: [question_of(line) for line in lines[name]] for name in lines})
    serving = Serving(model, "bfloat16", 2048, max(options.loads), 512 << 20)
    missed = 0
    with Fleet() as fleet:
        fleet.start(
            {"none": None, "echo": config},
            serving,
            free_ports(2),
            folder,
            1,
            SERVER_BYTES,
            lambda text: print(text, file=sys.stderr, flush=True),
        )
        pair = Pair(fleet.servers["none"], fleet.servers["echo"], prompts, options.tokens)
        for server in (pair.plain, pair.echo):
            pair.rate(server, max(options.loads), ENDLESS, 10.0)
        pair.echo.go_on()
        given = CostCurve.from_dict(pair.echo.given_options()["profile"], "echo.profile")
        pair.echo.halt()
        print(f"| curve | requests | first minute | afterwards (bar {BAR}) | turns |")
        print("|---|---|---|---|---|")
        for name in options.curves:
            pair.echo.go_on()
            pair.echo.switch({"profile": CURVES[name](given).to_dict()})
            pair.echo.halt()
            for concurrency in options.loads:
                first = pair.first_minute(concurrency)
                least, each = options.requests
                requests = round(max(least, each * concurrency))
                ratios = pair.turns(concurrency, requests, options.turns)
                median = statistics.median(ratios)
                missed += median < BAR
                spread = f"{min(ratios):.3f}..{max(ratios):.3f}"
                print(
                    f"| {name} | {concurrency} | {first:.3f} | {median:.3f} | {spread} |",
                    flush=True,
                )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
