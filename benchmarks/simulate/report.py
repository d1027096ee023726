# SPDX-License-Identifier: Apache-2.0
"""Tables of simulated results, as Markdown."""

from collections.abc import Mapping, Sequence

from benchmarks.simulate.costs import Result
from benchmarks.simulate.paper import BATCHES, PUBLISHED
from benchmarks.simulate.plans import BASELINE, PLAIN

Results = Mapping[str, Mapping[int, Result]]
"""By policy, by batch."""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def speed_table(results: Results, batches: Sequence[int]) -> str:
    """Tokens per second (ratio to no speculation; ratio to the best chain)."""
    rows = []
    for name, by_batch in results.items():
        cells = []
        for batch in batches:
            speed = by_batch[batch].tokens_per_s
            ratios = [
                f"{speed / base:.2f}"
                for base in (_speed(results, PLAIN, batch), best_chain(results, batch)[1])
                if base
            ]
            cells.append(f"{speed:,.0f} ({', '.join(ratios)})" if ratios else f"{speed:,.0f}")
        rows.append([name, *cells])
    return markdown(["tokens/s (to plain, to best chain)", *_columns(batches)], rows)


def work_table(results: Results, batches: Sequence[int]) -> str:
    """Why: accepted length, nodes, draft forwards, and the mean step."""
    rows = [
        [
            name,
            *(
                f"{r.emitted:.2f}, {r.step_nodes:.0f}, {r.layers:.1f}, {r.step_ms:.2f}"
                for r in (by_batch[batch] for batch in batches)
            ),
        ]
        for name, by_batch in results.items()
    ]
    head = "tokens a request, nodes a step, draft forwards, ms a step"
    return markdown([head, *_columns(batches)], rows)


def paper_table(by_model: Mapping[str, Results], batches: Sequence[int]) -> str | None:
    """Largest gain over EAGLE-3 within the paper's batch sizes, theirs and ours; None where
    nothing can be compared."""
    rows = []
    inside = [batch for batch in batches if BATCHES[0] <= batch <= BATCHES[1]]
    for model, results in by_model.items():
        if model not in PUBLISHED or BASELINE not in results or not inside:
            continue
        published = PUBLISHED[model]
        rows.append(
            [
                model,
                f"{published.best_gain:+.1%}",
                *(_best_gain(results, name, inside) for name in _candidates(by_model)),
                _at_256(published.eagle3_at_256, results, BASELINE),
                _at_256(published.echo_at_256, results, "echo"),
                _implied_step(published.eagle3_at_256, results),
            ]
        )
    if not rows:
        return None
    head = ["largest gain over EAGLE-3", "paper, echo"]
    head += [f"simulated, {name} (batch)" for name in _candidates(by_model)]
    head += ["EAGLE-3 at 256, paper / simulated tokens/s", "echo at 256"]
    head += ["ms a step of EAGLE-3 at 256, paper's tokens/s at our accepted length / simulated"]
    return markdown(head, rows)


def unrecorded_note(by_model: Mapping[str, Results]) -> str:
    """How often the replay was asked for what the trace does not hold."""
    worst: dict[str, float] = {}
    for results in by_model.values():
        for name, by_batch in results.items():
            share = max(result.unrecorded for result in by_batch.values())
            worst[name] = max(worst.get(name, 0.0), share)
    shares = ", ".join(f"{name} {share:.1%}" for name, share in worst.items() if share > 0)
    return f"Expanded nodes without recorded children (at most): {shares or 'none'}."


def measured_table(
    results: Results, measured: Mapping[str, Mapping[int, float]], batches: Sequence[int]
) -> str:
    """Predicted against measured: tokens per second, and the ratio to no speculation."""
    rows = []
    for name, by_batch in measured.items():
        cells = []
        for batch in batches:
            if name not in results or batch not in by_batch:
                cells.append("-")
                continue
            speed, real = results[name][batch].tokens_per_s, by_batch[batch]
            cell = f"{speed:,.0f} / {real:,.0f} ({speed / real - 1:+.0%})"
            plain, real_plain = _speed(results, PLAIN, batch), measured.get(PLAIN, {}).get(batch)
            if plain and real_plain and name != PLAIN:
                cell += f"; {speed / plain:.2f} / {real / real_plain:.2f}"
            cells.append(cell)
        rows.append([name, *cells])
    head = "tokens/s predicted / measured (error); ratio to plain predicted / measured"
    return markdown([head, *_columns(batches)], rows)


def best_chain(results: Results, batch: int) -> tuple[str, float]:
    """The chain of a fixed length that is fastest at ``batch``, and its speed; ("", 0)."""
    chains = {n: r[batch].tokens_per_s for n, r in results.items() if n.startswith("chain-")}
    return max(chains.items(), key=lambda item: item[1], default=("", 0.0))


def _candidates(by_model: Mapping[str, Results]) -> list[str]:
    """Plain decoding is among them: its gain is what stopping to speculate brings."""
    names = list(next(iter(by_model.values())))
    shown = (PLAIN, "echo", "goodput", "dense", "fixed-threshold")
    return [name for name in names if name.startswith(shown)]


def _best_gain(results: Results, name: str, batches: Sequence[int]) -> str:
    gains = {
        batch: results[name][batch].tokens_per_s / results[BASELINE][batch].tokens_per_s - 1
        for batch in batches
    }
    batch = max(gains, key=gains.__getitem__)
    return f"{gains[batch]:+.1%} ({batch})"


def _at_256(published: int | None, results: Results, name: str) -> str:
    speed = _speed(results, name, 256)
    return f"{f'{published:,}' if published else '-'} / {f'{speed:,.0f}' if speed else '-'}"


def _implied_step(published: int | None, results: Results) -> str:
    if published is None or 256 not in results[BASELINE]:
        return "-"
    simulated = results[BASELINE][256]
    return f"{1000 * 256 * simulated.emitted / published:.0f} / {simulated.step_ms:.1f}"


def _speed(results: Results, name: str, batch: int) -> float:
    by_batch = results.get(name, {})
    return by_batch[batch].tokens_per_s if batch in by_batch else 0.0


def _columns(batches: Sequence[int]) -> list[str]:
    return [f"B = {batch}" for batch in batches]
