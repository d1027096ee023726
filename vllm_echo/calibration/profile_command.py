# SPDX-License-Identifier: Apache-2.0
"""`vllm-echo profile`: measure the cost curve, write it into echo.json, say where its knee is."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_echo.calibration.echo_file import check_writable, read_echo_file, write_echo_file
from vllm_echo.calibration.profile import LONG_CONTEXT, STEPS, Measurements, take_measurements
from vllm_echo.core.acceptance import uncalibrated
from vllm_echo.core.budget import ElasticBudget
from vllm_echo.core.config import AUTO, EchoConfig
from vllm_echo.core.cost import CostCurve, StepLoad
from vllm_echo.core.policies import MANY_NODES, make_policy
from vllm_echo.core.timing import NOISY


@dataclass(frozen=True)
class ProfileOptions:
    """The command's options; ``cli.py`` documents them."""

    model: str
    draft: str | None
    output: Path
    dtype: str
    max_model_len: int | None
    enforce_eager: bool
    max_requests: int


def run_profile(options: ProfileOptions) -> int:
    """Measure, write echo.json and a picture, print the curve."""
    check_writable(options.output)
    content = read_echo_file(options.output, options.draft)
    config = EchoConfig.from_speculative_config(content)
    measurements = _measure(options, content, config)
    curve = measurements.curve()
    echo = content["echo"]
    echo["profile"] = curve.to_dict()
    echo["k_max"] = AUTO
    write_echo_file(options.output, content)
    picture = options.output.with_suffix(".profile.png")
    plot_curve(picture, curve, f"{Path(options.model).name}: step time by rows")
    print(describe(curve, config, options.max_requests))
    if measurements.noise > NOISY:
        print(
            f"[vllm-echo] the machine was busy: step times differ by {measurements.noise:.2f} from "
            "quartile to quartile; profile again with nothing else running",
            file=sys.stderr,
        )
    print(f"[vllm-echo] wrote {options.output} and {picture}")
    return 0


def _measure(options: ProfileOptions, content: dict[str, Any], config: EchoConfig) -> Measurements:
    from tqdm import tqdm

    from vllm_echo.integration.offline import OfflineEngine

    engine_args: dict[str, Any] = {
        "dtype": options.dtype,
        "max_num_seqs": options.max_requests,
        "enforce_eager": options.enforce_eager,
    }
    if options.max_model_len is not None:
        engine_args["max_model_len"] = options.max_model_len
    echo = {"policy": "echo", "k_max": 0, "top_k": config.top_k, "gates": []}
    engine = OfflineEngine(
        options.model, content["model"], echo, config.num_speculative_tokens, engine_args
    )
    bar = tqdm(unit="run", file=sys.stderr, desc="profiling")

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        bar.refresh()

    def run(requests: int, context: int, echo_options: dict[str, Any]) -> list[dict[str, Any]]:
        # Steps that accept drafts answer sooner: enough tokens for the same number of steps.
        depth = echo_options.get("max_depth", 0)
        tokens = STEPS * (1 + depth)
        prompts = [
            [(7 * i + 31 * j * j + 13) % (engine.vocab_size - 100) + 50 for j in range(context)]
            for i in range(requests)
        ]
        return engine.step_log(prompts, echo_options, tokens)

    try:
        return take_measurements(
            run,
            options.max_requests,
            config.num_speculative_tokens,
            min(engine.max_model_len // 2, LONG_CONTEXT),
            progress,
        )
    finally:
        bar.close()
        engine.close()


def describe(curve: CostCurve, config: EchoConfig, max_requests: int) -> str:
    """The curve and the budgets that follow, as a Markdown table."""
    calibration = config.calibration or uncalibrated()
    shape = make_policy(replace(config, profile=curve)).shape
    budget = ElasticBudget(curve, calibration, shape, config.num_speculative_tokens, MANY_NODES)
    lines = ["| requests | plain step, ms | one more node, ms | K_max | break-even acceptance |"]
    lines.append("|---|---|---|---|---|")
    for requests, _ in curve.step:
        if requests > max_requests:
            break
        load = StepLoad(requests)
        offer = budget.offer(load)
        price = f"{offer.price:.2f}" if offer.num_nodes else "does not pay"
        lines.append(
            f"| {requests} | {curve.plain_ms(load):.1f} | {curve.nodes_ms(load, 1):.2f} | "
            f"{offer.num_nodes} | {price} |"
        )
    source = "the file's calibration" if config.calibration else "no calibration yet"
    lines += ["", f"Knee of the paper's hinge: {curve.knee()} rows. K_max by {source}."]
    for name, what in (
        ("roots", "first candidates of n requests"),
        ("layer", "a layer of n nodes"),
        ("catch_up", "catch-up of n roots"),
    ):
        line = getattr(curve, name)
        lines.append(f"- {what}: {line.fixed:.2f} + {line.each:.3f} n ms")
    return "\n".join(lines)


def plot_curve(path: Path, curve: CostCurve, title: str) -> None:
    """Step time over rows, with the knee, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    axes.plot([r for r, _ in curve.step], [ms for _, ms in curve.step], marker="o")
    knee = curve.knee()
    axes.axvline(knee, linestyle="dashed", color="black")
    axes.annotate(
        f"knee {knee}", (knee, curve.step_ms(knee)), xytext=(6, -14), textcoords="offset points"
    )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rows of a step (roots and nodes)")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
