# SPDX-License-Identifier: Apache-2.0
"""Pictures: throughput, tail latency, accepted length, stage times, against concurrency."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.engines import PLAIN, is_stock, label
from benchmarks.serving.journal import Journal
from benchmarks.serving.report import suffix, title
from benchmarks.serving.results import Condition, Results

BLUES = {"eagle3-1": "#9ecae1", "eagle3-2": "#6baed6", "eagle3-3": "#4292c6"}
BLUES |= {"eagle3-4": "#2171b5", "eagle3-5": "#08306b"}
COLOURS = {
    "none": "dimgray",
    "none-sync": "black",
    "ngram": "tab:orange",
    "echo": "tab:red",
    "goodput": "tab:green",
    "dense": "tab:purple",
    "fixed-threshold": "tab:pink",
    "static": "tab:brown",
    "ddd": "tab:olive",
    "chain": "tab:cyan",
    "echo-no-transfer": "tab:gray",
    "echo-no-width": "gold",
    **BLUES,
}


def draw_all(journal: Journal, folder: Path) -> list[Path]:
    """Write all pictures, for every condition; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    results = Results(journal)
    paths = []
    for condition in results.conditions:
        for name, draw in PICTURES.items():
            figure = draw(results, condition)
            if figure is not None:
                path = folder / f"{name}-{suffix(condition)}.png"
                figure.suptitle(title(condition))
                figure.savefig(path, dpi=120)
                paths.append(path)
    return paths


def throughput(results: Results, condition: Condition) -> Any:
    """vLLM's own engines, and the default configuration."""
    return speeds(results, condition, [*stock(results), *default_of(results)])


def policies(results: Results, condition: Condition) -> Any:
    """Echo's policies and ablations, beside plain decoding."""
    names = [name for name in results.engines if name not in stock(results)]
    return speeds(results, condition, [*results.plain, *names]) if len(names) > 1 else None


def speeds(results: Results, condition: Condition, names: Sequence[str]) -> Any:
    """Tokens per second, and the ratio to the better plain decoding with its range over rounds."""
    figure, (left, right) = new_figure(1, 2)
    for name in names:
        curve(left, results, name, lambda n, c: value(results.speed(condition, n, c)))
        curve(right, results, name, lambda n, c: value(results.ratio(condition, n, c)))
        spreads = {c: results.ratio(condition, name, c) for c in results.concurrencies}
        shown = {c: s for c, s in spreads.items() if s and s.count > 1 and name not in PLAIN}
        right.fill_between(
            list(shown),
            [s.least for s in shown.values()],
            [s.most for s in shown.values()],
            color=COLOURS.get(name),
            alpha=0.12,
            linewidth=0,
        )
    log_scale(left)
    left.set_ylabel("output tokens/s")
    right.set_ylabel("ratio to the better plain decoding")
    finish(results, [left, right])
    return figure


def latency(results: Results, condition: Condition) -> Any:
    """Medians and tails."""
    figure, axes = new_figure(2, 2)
    shown = [*stock(results), *default_of(results)]
    panels = [("tpot", 50), ("tpot", 99), ("e2e", 50), ("e2e", 99)]
    for axis, (kind, percent) in zip(axes.flat, panels, strict=True):
        for name in shown:
            curve(axis, results, name, latency_of(results, condition, kind, percent))
        axis.set_ylabel(f"{kind.upper()} p{percent}, ms")
        log_scale(axis)
    finish(results, list(axes.flat))
    return figure


def latency_of(
    results: Results, condition: Condition, kind: str, percent: int
) -> Callable[[str, int], float | None]:
    """(engine, concurrency) -> a percentile of one kind of latency."""
    return lambda name, c: results.percentile(condition, name, c, kind, percent)


def accepted(results: Results, condition: Condition) -> Any:
    """Tokens of a request and step in which something was drafted for it."""
    figure, (axis,) = new_figure(1, 1)
    for name in results.engines:
        curve(axis, results, name, lambda n, c: results.accepted_length(condition, n, c))
    axis.set_ylabel("accepted length, with the bonus token")
    finish(results, [axis])
    return figure


def stages(results: Results, condition: Condition) -> Any:
    """A step of the default configuration, stage by stage, beside a plain step."""
    default = results.default
    if default is None or not default_of(results):
        return None
    loads = {c: results.stages(condition, default, c) for c in results.concurrencies}
    names = list(dict.fromkeys(name for times in loads.values() for name in times))
    if not names:
        return None
    figure, (axis,) = new_figure(1, 1)
    places = list(range(len(loads)))
    bottom = [0.0] * len(loads)
    for name in names:
        heights = [times.get(name, 0.0) for times in loads.values()]
        colour = "lightgray" if name == "rest" else None
        axis.bar(places, heights, 0.6, bottom=bottom, label=name, color=colour)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    plain = [results.step_ms(condition, results.baseline(condition, c), c) or 0.0 for c in loads]
    axis.plot(places, plain, "k_", markersize=28, label="whole step, better plain decoding")
    axis.set_xticks(places, [str(c) for c in loads])
    axis.set_xlabel("concurrency")
    axis.set_ylabel(f"{results.default}: ms per step")
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


PICTURES: dict[str, Callable[[Results, Condition], Any]] = {
    "throughput": throughput,
    "policies": policies,
    "latency": latency,
    "accepted-length": accepted,
    "stages": stages,
}


def stock(results: Results) -> list[str]:
    engines = results.settings["engines"]
    return [name for name in results.engines if is_stock(name, engines[name]["server"])]


def default_of(results: Results) -> list[str]:
    return [name for name in results.engines if name == results.default]


def new_figure(rows: int, columns: int) -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        rows, columns, figsize=(6.5 * columns, 4.8 * rows), layout="constrained", squeeze=False
    )
    plt.close(figure)  # kept by us only
    return figure, axes if rows > 1 else axes[0]


def value(spread: Any) -> float | None:
    return spread.median if spread else None


def curve(axis: Any, results: Results, name: str, y: Callable[[str, int], float | None]) -> None:
    """One engine's line; nothing where there is nothing to show."""
    points = [(c, y(name, c)) for c in results.concurrencies]
    points = [(c, height) for c, height in points if height is not None]
    if not points:
        return
    axis.plot(
        *zip(*points, strict=True),
        marker="o",
        markersize=3,
        color=COLOURS.get(name),
        linestyle="--" if name in PLAIN else "-",
        linewidth=2.6 if name == results.default else 1.3,
        label=label(name, results.default),
    )


def log_scale(axis: Any) -> None:
    """With plain numbers at 1, 2 and 5 times the powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def finish(results: Results, axes: Sequence[Any]) -> None:
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(results.concurrencies, [str(c) for c in results.concurrencies])
        axis.set_xlabel("concurrency")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
