# SPDX-License-Identifier: Apache-2.0
"""Tables and verdicts in Markdown, all computed from the measurements."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.serving.engines import BASELINE, is_stock, label
from benchmarks.serving.journal import Journal
from benchmarks.serving.results import Condition, Results, Spread

BUSY_OTHERS = 0.1
"""Cores used by other programs from which on a report warns."""


def render(journal: Journal, pictures: Sequence[Path] = ()) -> str:
    """The whole report."""
    results = Results(journal)
    parts = ["# Throughput and latency through `vllm serve`", about(journal, results)]
    for condition in results.conditions:
        parts.append(f"## {title(condition)}")
        parts.append(speed_table(results, condition))
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
    # Earlier results have one limit for all answers.
    limits = " to ".join(map(str, settings.get("output_limits", [settings["output_tokens"]])))
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
    ]
    return "\n".join(lines)


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
        if name != BASELINE and ratio:
            text += f" (**{ratio.median:.2f}**, {ratio.least:.2f}..{ratio.most:.2f})"
        length = results.accepted_length(condition, name, concurrency)
        return f"{text}, {length:.2f}" if length else text

    heading = (
        "Tokens per second, median over rounds; in brackets the ratio to no speculation of the "
        "same round, median and range; then the accepted length with the bonus token."
    )
    return heading + "\n\n" + over_loads(results, "tokens/s", results.engines, cell)


def verdict_table(results: Results, condition: Condition) -> str:
    """The default configuration against no speculation and against vLLM's eagle3."""
    default = results.default
    if default is None or default not in results.engines:
        return ""
    rows = []
    for c in results.concurrencies:
        spread = results.quotient(condition, default, BASELINE, c)
        rows.append([f"c = {c}", label(BASELINE), *verdict(spread)])
    for c in results.concurrencies:
        best = results.best(condition, results.eagle3, c)
        if best:
            spread = results.quotient(condition, default, best, c)
            rows.append([f"c = {c}", f"best eagle3: K = {best[7:]}", *verdict(spread)])
    rows += sweep_rows(results, condition, default)
    head = ["load", f"{default}, divided by", "median", "range", "rounds", "verdict"]
    return table(head, [row for row in rows if len(row) == len(head)])


def sweep_rows(results: Results, condition: Condition, default: str) -> list[list[str]]:
    rows = [
        [
            "sum over c",
            label(BASELINE),
            *verdict(results.sum_quotient(condition, default, BASELINE)),
        ]
    ]
    totals = {
        name: statistics.median(sums.values())
        for name in results.eagle3
        if (sums := results.sums(condition, name))
    }
    if totals:
        best = max(totals, key=lambda name: totals[name])
        spread = results.sum_quotient(condition, default, best)
        rows.append(["sum over c", f"best single eagle3: K = {best[7:]}", *verdict(spread)])
    return rows


def verdict(spread: Spread | None) -> list[str]:
    """Median, range, rounds, and what they support."""
    if spread is None:
        return []
    if spread.count < 2:
        text = "one round only"
    elif spread.least > 1:
        text = "faster in every round"
    elif spread.most < 1:
        text = "slower in every round"
    else:
        text = "not resolved"
    numbers = f"{spread.least:.3f}..{spread.most:.3f}"
    return [f"**{spread.median:.3f}**", numbers, str(spread.count), text]


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
    for name, engine in (("whole step", default), ("whole step, no speculation", BASELINE)):
        whole = [results.step_ms(condition, engine, c) for c in loads]
        rows.append([name, *(f"{ms:.2f}" if ms else "" for ms in whole)])
    return table([f"{default}, ms per step", *(f"c = {c}" for c in loads)], rows)


def notes(journal: Journal, results: Results) -> str:
    """What a reader should know before believing the numbers."""
    found = [
        f"{name} was left out: {reason}." for name, reason in results.settings["skipped"].items()
    ]
    sampling = any(condition.temperature > 0 for condition in results.conditions)
    engines = results.settings["engines"]
    if sampling and any(is_stock(name, engines[name]["server"]) for name in results.engines[1:]):
        found.append(
            "vLLM's own speculation was served with a fault of its sampling on CPUs mended "
            "(benchmarks/serving/mended.py says which)."
        )
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


def greedy_tokens(results: Results) -> list[float]:
    """Output tokens by engine, relative to the baseline's in the same places."""
    greedy = [m for m in results.measurements if m["temperature"] == 0]
    baseline = {Results._place(m): m["output_tokens"] for m in greedy if m["engine"] == BASELINE}
    found = []
    for name in results.engines:
        mine = [m for m in greedy if m["engine"] == name and Results._place(m) in baseline]
        if mine and name != BASELINE:
            expected = sum(baseline[Results._place(m)] for m in mine)
            found.append(sum(m["output_tokens"] for m in mine) / expected)
    return found
