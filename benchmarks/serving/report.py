# SPDX-License-Identifier: Apache-2.0
"""Tables and verdicts in Markdown, all computed from the measurements."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.datasets import LONG, LONG_TOKENS
from benchmarks.serving.engines import PLAIN, is_stock, label
from benchmarks.serving.journal import Journal
from benchmarks.serving.results import Condition, Results, Spread

BUSY_OTHERS = 0.1
"""Cores used by other programs from which on a report warns."""
LOAD_BAR = 0.98
"""The default configuration at every load, of plain decoding and of the best eagle3 there."""
SWEEP_BAR = 1.15
"""Its tokens per second summed over the loads, of the best single eagle3's."""
NOTHING_ACCEPTED = 1.02
"""An accepted length up to which drafts may as well not be there."""


def render(journal: Journal, pictures: Sequence[Path] = ()) -> str:
    """The whole report."""
    results = Results(journal)
    parts = ["# Throughput and latency through `vllm serve`", about(journal, results)]
    for condition in results.conditions:
        parts.append(f"## {title(condition)}")
        parts.append(speed_table(results, condition))
        parts.append(sampling_note(results, condition))
        parts.append(verdict_table(results, condition))
        parts.append(latency_table(results, condition, "tpot", "ms per output token", 1.0, 1))
        parts.append(latency_table(results, condition, "e2e", "seconds per answer", 1e-3, 2))
        parts.append(stage_table(results, condition))
        names = [p for p in pictures if p.stem.endswith(suffix(condition))]
        parts += [f"![{picture.stem}]({picture.name})" for picture in names]
    parts.append(notes(journal, results))
    return "\n\n".join(part for part in parts if part) + "\n"


def title(condition: Condition) -> str:
    kind = "greedy" if condition.temperature == 0 else f"temperature {condition.temperature:g}"
    return f"{condition.dataset}, {kind}"


def suffix(condition: Condition) -> str:
    """Of picture files."""
    return f"{condition.dataset}-t{condition.temperature:g}"


def about(journal: Journal, results: Results) -> str:
    settings, session = journal.settings, journal.sessions[0]
    rounds = len({m["round"] for m in results.measurements})
    changes = session["uncommitted_changes"]
    versions = ", ".join(f"{name} {number}" for name, number in session["versions"].items())
    limits = " to ".join(map(str, settings["output_limits"]))
    lines = [
        f"    {session['command']}",
        "",
        f"{session['date']}, {session['processor']}, {session['usable_cores']} cores, "
        f"{session['memory_gib']} GiB; commit {(session['commit'] or 'unknown')[:12]}"
        + (f" with changes {changes}" if changes else "")
        + f"; {versions}.",
        "",
        f"Model {Path(settings['model']).name}, {settings['dtype']}; at most "
        f"{limits} tokens an answer; {rounds} rounds, engines interleaved"
        + (f", in {len(settings['groups'])} groups" if len(settings["groups"]) > 1 else "")
        + ". Mean prompt tokens: "
        + ", ".join(f"{name} {mean:.0f}" for name, mean in settings["mean_prompt_tokens"].items())
        + ".",
        "",
        what_is_measured(settings),
    ]
    return "\n".join(lines)


def what_is_measured(settings: Mapping[str, Any]) -> str:
    """How the numbers came about, and what they are divided by."""
    sentences = [
        "Tokens per second are all output tokens over the whole time from the first request on, "
        "prompts included; further requests hold the load until the last of those that are waited "
        "for is answered.",
        "Sets take turns, each as often as the others."
        if len(settings["mean_prompt_tokens"]) > 1
        else "",
        f"Those of `{LONG}` have {LONG_TOKENS[0]} to {LONG_TOKENS[1]} tokens: solved questions of "
        "the folder's own sets before one that is not."
        if LONG in settings["mean_prompt_tokens"]
        else "There are no long prompts among them.",
        "Plain decoding is measured as vLLM starts it and with `--no-async-scheduling`; ratios are "
        "to the better of the two at that load (by the median, over rounds, of one's ratio to the "
        "other), in the same round.",
    ]
    return " ".join(filter(None, sentences))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def over_loads(
    results: Results, corner: str, names: Sequence[str], cell: Callable[[str, int], str]
) -> str:
    """Engines down, concurrencies across."""
    rows = [
        [label(name, results.default), *(cell(name, c) for c in results.concurrencies)]
        for name in names
    ]
    return table([corner, *(f"c = {c}" for c in results.concurrencies)], rows)


def speed_table(results: Results, condition: Condition) -> str:
    def cell(name: str, concurrency: int) -> str:
        speed = results.speed(condition, name, concurrency)
        if speed is None:
            return ""
        text = f"{speed.median:.0f}"
        ratio = results.ratio(condition, name, concurrency)
        if name == results.baseline(condition, concurrency):
            text += " (**1**)"
        elif ratio:
            text += f" (**{ratio.median:.2f}**, {ratio.least:.2f}..{ratio.most:.2f})"
        length = results.accepted_length(condition, name, concurrency)
        return f"{text}, {length:.2f}" if length else text

    heading = (
        "Tokens per second, median over rounds; in brackets the ratio to the better plain decoding "
        "of the same round, median and range; then the accepted length with the bonus token."
    )
    return heading + "\n\n" + over_loads(results, "tokens/s", results.engines, cell)


def verdict_table(results: Results, condition: Condition) -> str:
    """The default configuration against plain decoding and against vLLM's eagle3, with the bars."""
    default = results.default
    if default is None or default not in results.engines:
        return ""
    rows = []
    for c in results.concurrencies:
        plain = results.baseline(condition, c)
        spread = results.quotient(condition, default, plain, c)
        rows.append([f"c = {c}", f"better plain: {setting(plain)}", *verdict(spread, LOAD_BAR)])
    for c in results.concurrencies:
        best = results.best(condition, results.eagle3, c)
        if best:
            spread = results.quotient(condition, default, best, c)
            rows.append([f"c = {c}", f"best eagle3: K = {best[7:]}", *verdict(spread, LOAD_BAR)])
    rows += sweep_rows(results, condition, default)
    head = ["load", f"{default}, divided by", "median", "range", "rounds", "bar", "verdict"]
    heading = (
        f"Bars: {LOAD_BAR} of the better plain decoding and of the best eagle3 at every load, "
        f"{SWEEP_BAR} of the best single eagle3 in the sum of tokens per second over all loads. "
        "The median decides."
    )
    if results.eagle3:
        heading += f" eagle3 was measured with K = {', '.join(n[7:] for n in results.eagle3)}."
    return heading + "\n\n" + table(head, [row for row in rows if len(row) == len(head)])


def setting(plain: str) -> str:
    """Of plain decoding."""
    return " ".join(PLAIN[plain]) or "as vLLM starts it"


def sweep_rows(results: Results, condition: Condition, default: str) -> list[list[str]]:
    rows = []
    if sums := results.sums(condition, default):
        whole = results.plain_sum(condition)
        spread = Spread.of(value / whole for value in sums.values())
        rows.append(["sum over c", "better plain of each load", *verdict(spread, None)])
    totals = {
        name: statistics.median(sums.values())
        for name in results.eagle3
        if (sums := results.sums(condition, name))
    }
    if totals:
        best = max(totals, key=lambda name: totals[name])
        spread = results.sum_quotient(condition, default, best)
        cells = verdict(spread, SWEEP_BAR)
        rows.append(["sum over c", f"best single eagle3: K = {best[7:]}", *cells])
    return rows


def verdict(spread: Spread | None, bar: float | None) -> list[str]:
    """Median, range, rounds, the bar, and whether it is met; nothing of nothing."""
    if spread is None:
        return []
    numbers = f"{spread.least:.3f}..{spread.most:.3f}"
    cells = [f"**{spread.median:.3f}**", numbers, str(spread.count)]
    if bar is None:
        return [*cells, "", ""]
    text = "met" if spread.median >= bar else "missed"
    if spread.count < 2:
        text += ", one round only"
    elif spread.least < bar <= spread.most:
        text += ", not in every round"
    return [*cells, f"{bar}", text]


def sampling_note(results: Results, condition: Condition) -> str:
    """What vLLM's own speculation does where the target samples, said where it shows."""
    names = [
        name
        for name in results.engines
        if name not in PLAIN and is_stock(name, results.settings["engines"][name]["server"])
    ]
    if condition.temperature == 0 or not names:
        return ""
    text = (
        "vLLM 0.32 as published accepts no draft of a sampled request on a CPU (accepted length "
        "1.00): its sampler divides by uninitialised memory. Its speculation is served with that "
        "mended here (benchmarks/serving/mended.py), so its numbers are better than a user's."
    )
    lengths = {
        name: [
            length
            for c in results.concurrencies
            if (length := results.accepted_length(condition, name, c))
        ]
        for name in names
    }
    idle = [name for name, of in lengths.items() if of and max(of) < NOTHING_ACCEPTED]
    if idle:
        named = ", ".join(label(name) for name in idle)
        text += f" **Nothing was accepted all the same of {named}: that is no comparison.**"
    return text


def latency_table(
    results: Results, condition: Condition, name: str, unit: str, scale: float, digits: int
) -> str:
    def cell(engine: str, concurrency: int) -> str:
        values = [
            results.percentile(condition, engine, concurrency, name, percent)
            for percent in (50, 99)
        ]
        return " / ".join(f"{scale * value:.{digits}f}" for value in values if value is not None)

    return over_loads(results, f"{name.upper()}, {unit}, p50 / p99", results.engines, cell)


def stage_table(results: Results, condition: Condition) -> str:
    """Where a step of the default configuration spends its time."""
    default = results.default
    if default is None or default not in results.engines:
        return ""
    loads = {c: results.stages(condition, default, c) for c in results.concurrencies}
    loads = {c: stages for c, stages in loads.items() if stages}
    names = list(dict.fromkeys(name for stages in loads.values() for name in stages))
    if not names:
        return ""
    rows = [[name, *(f"{loads[c].get(name, 0.0):.2f}" for c in loads)] for name in names]
    plain = {c: results.baseline(condition, c) for c in loads}
    for name, engines in (
        ("whole step", dict.fromkeys(loads, default)),
        ("whole step, better plain decoding", plain),
    ):
        whole = [results.step_ms(condition, engine, c) for c, engine in engines.items()]
        rows.append([name, *(f"{ms:.2f}" if ms else "" for ms in whole)])
    return table([f"{default}, ms per step", *(f"c = {c}" for c in loads)], rows)


def notes(journal: Journal, results: Results) -> str:
    """What a reader should know before believing the numbers."""
    found = [
        f"{name} was left out: {reason}." for name, reason in results.settings["skipped"].items()
    ]
    found += scheduling_notes(results)
    if not journal.complete:
        found.append("The run is not complete.")
    if len({s["commit"] for s in journal.sessions}) > 1:
        found.append("The run was interrupted and went on with another commit.")
    busy = [m["busy_cores"]["others"] for m in results.measurements]
    idle = [m["busy_cores"]["idle_servers"] for m in results.measurements]
    if statistics.median(busy) > BUSY_OTHERS:
        found.append(
            f"**Other programs kept {statistics.median(busy):.2f} cores busy (median; at most "
            f"{max(busy):.2f}); timings need a quiet machine.**"
        )
    else:
        found.append(f"Other programs kept {statistics.median(busy):.2f} cores busy (median).")
    found.append(f"Idle servers used at most {max(idle):.3f} cores.")
    preempted = sum(m["drafting"]["preemptions"] for m in results.measurements)
    if preempted:
        found.append(f"**Requests were preempted {preempted:.0f} times: raise --kv-gib.**")
    tokens = greedy_tokens(results)
    if tokens:
        found.append(
            f"Greedy answers of the same prompts: between {min(tokens):.3f} and {max(tokens):.3f} "
            "times the tokens that plain decoding gave."
        )
    return "## Notes\n\n" + "\n".join(f"- {note}" for note in found)


def scheduling_notes(results: Results) -> list[str]:
    """How plain decoding's servers scheduled, as they say themselves, whatever was asked for."""
    ahead = {
        name: {m["schedules_ahead"] for m in results.measurements if name == m["engine"]}
        for name in results.plain
        if any("schedules_ahead" in m for m in results.measurements if name == m["engine"])
    }
    if not ahead:
        return []
    said = {True: "on", False: "off"}
    found = [
        "Asynchronous scheduling, as the servers report it: "
        + "; ".join(
            f"{label(name)}: {' and '.join(said[value] for value in sorted(values))}"
            for name, values in ahead.items()
        )
        + "."
    ]
    if len(ahead) > 1 and len(set.union(*ahead.values())) == 1:
        found.append(
            "Both settings of plain decoding were the same program, then, and their ratio is the "
            "noise of this comparison; the better of two equals is a little above either."
        )
    return found


def greedy_tokens(results: Results) -> list[float]:
    """Output tokens by engine, relative to plain decoding's in the same places."""
    found = []
    for name in results.engines:
        pairs = [
            (m["output_tokens"], plain["output_tokens"])
            for m in results.measurements
            if m["engine"] == name and m["temperature"] == 0
            if (plain := results.beside(m, next(iter(PLAIN))))
        ]
        if pairs and name not in PLAIN:
            mine, expected = map(sum, zip(*pairs, strict=True))
            found.append(mine / expected)
    return found
