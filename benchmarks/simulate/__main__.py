# SPDX-License-Identifier: Apache-2.0
"""Simulated throughput of policies on machines that are not at hand.

    vllm-echo calibrate --keep-work --work traces --output echo.json ...
    python -m benchmarks.simulate --trace traces/greedy-*.npz --calibration echo.json --held-out

Drafts and acceptances are recorded ones (``vllm_echo.core.trace``), decisions are those of the code
that serves, and time is a cost curve: of GPUs by arithmetic (``gpus.py``), or with ``--curve`` a
measured one (`vllm-echo profile`). docs/simulation.md says what that assumes.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulate import paper, report
from benchmarks.simulate.costs import Result, add_up
from benchmarks.simulate.gpus import Gpus, cost_curve, step_parts
from benchmarks.simulate.loop import Step, Workload, serve
from benchmarks.simulate.measured import read_measured
from benchmarks.simulate.models import MODELS
from benchmarks.simulate.plans import (
    DEFAULT_NAMES,
    Tuning,
    depends_on_curve,
    make_config,
)
from benchmarks.simulate.replay import RecordedTrees, easiest_requests
from benchmarks.simulate.report import Results
from vllm_echo.calibration.calibrate_command import HELD_OUT_EVERY, split_requests
from vllm_echo.core.config import EchoConfig, parse_speculative_config
from vllm_echo.core.cost import CostCurve
from vllm_echo.core.trace import DraftTrace
from vllm_echo.errors import EchoError


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    args = parser.parse_args(arguments)
    trace = _trace(args)
    gpus = replace(Gpus(), count=args.gpus)
    context = args.context or float(trace.context.mean())
    try:
        study = Study(RecordedTrees(trace), _tuning(args.calibration), args)
        by_model = _simulate(study, gpus, context)
    except (ValueError, EchoError) as error:
        parser.error(str(error))
    _print(study, gpus, context, by_model)
    if args.output:
        _write(args, gpus, context, trace, by_model)


class Study:
    """Policies over batches; runs that no curve decides about are served once for all curves."""

    def __init__(self, recorded: RecordedTrees, tuning: Tuning, args: argparse.Namespace):
        self.recorded = recorded
        self.tuning = tuning
        self.args = args
        self._runs: dict[tuple[str, int], list[Step]] = {}

    def results(self, curve_at: Callable[[int], CostCurve]) -> dict[str, dict[int, Result]]:
        """By policy and batch; ``curve_at`` gives the curve of a batch."""
        args = self.args
        return {
            name: {batch: self._result(name, batch, curve_at(batch)) for batch in args.batch}
            for name in args.policies
        }

    def _result(self, name: str, batch: int, curve: CostCurve) -> Result:
        config = make_config(name, self.recorded, curve, self.tuning)
        steps = self._runs.get((name, batch))
        if steps is None:
            steps = serve(self.recorded, config, self._workload(batch))
            if not depends_on_curve(config):
                self._runs[name, batch] = steps
        return add_up(curve, steps)

    def _workload(self, batch: int) -> Workload:
        args = self.args
        turns = self.recorded.trace.num_roots if args.turns is None else args.turns
        return Workload(
            batch=batch,
            num_steps=max(args.steps, turns // batch),
            requests_per_slot=args.requests_per_slot,
            prefill=args.prefill,
            seed=args.seed,
        )


def _trace(args: argparse.Namespace) -> DraftTrace:
    trace = DraftTrace.join([DraftTrace.load(str(path)) for path in args.trace])
    if args.held_out:
        trace = split_requests(trace, HELD_OUT_EVERY)[1]
    if args.output_tokens:
        trace = trace.select(trace.positions <= args.output_tokens)
    return easiest_requests(trace, args.easiest) if args.easiest < 1 else trace


def _simulate(study: Study, gpus: Gpus, context: float) -> dict[str, dict[str, dict[int, Result]]]:
    """By model, or under the name of the curve's file."""
    args = study.args
    if args.curve:
        curve = _curve(args.curve)
        return {str(args.curve): study.results(lambda batch: curve)}
    curves = {
        name: partial(cost_curve, gpus, MODELS[name], context=context) for name in args.models
    }
    return {name: study.results(curve_at) for name, curve_at in curves.items()}


def _print(study: Study, gpus: Gpus, context: float, by_model: Mapping[str, Results]) -> None:
    args = study.args
    print(_description(study))
    if not args.curve:
        print(_assumptions(gpus, context))
    for name, table in by_model.items():
        print(f"\n### {name}\n")
        print(report.speed_table(table, args.batch) + "\n")
        print(report.work_table(table, args.batch))
    print("\n" + report.unrecorded_note(by_model))
    if not args.curve and (comparison := report.paper_table(by_model, args.batch)):
        print(f"\n### Beside the paper\n\n{comparison}\n\n{paper.NOT_COMPARABLE}")
    if args.measured:
        measured = read_measured(args.measured)
        for table in by_model.values():
            print(f"\n### Against {args.measured}\n")
            print(report.measured_table(table, measured, args.batch))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--trace", type=Path, nargs="+", required=True, help="draft traces (.npz), joined")
    add("--held-out", action="store_true", help="only requests that calibrate did not fit")
    add("--calibration", type=Path, help="echo.json with echo.calibration and echo.gates")
    add("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    add("--gpus", type=int, default=8, help="GPUs in tensor parallel")
    add("--context", type=float, help="context tokens a request (default: the trace's mean)")
    add("--curve", type=Path, help="echo.json whose echo.profile replaces models and GPUs")
    add("--measured", type=Path, help="results of benchmarks.serving, or a table")
    add("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    add("--policies", nargs="+", default=list(DEFAULT_NAMES), metavar="POLICY")
    add("--steps", type=int, default=300, help="steps of the closed loop, at least")
    add("--turns", type=int, help="its requests times steps, at least (default: the roots)")
    add("--requests-per-slot", type=int, default=0, help="serve so many to the end instead")
    add("--prefill", action="store_true", help="prompts cost rows")
    add("--output-tokens", type=int, default=0, help="cut the recorded outputs to so many")
    add("--easiest", type=float, default=1.0, help="share of the requests, best accepted first")
    add("--seed", type=int, default=0)
    add("--output", type=Path, help="everything as JSON")
    return parser


def _options(path: Path) -> dict[str, Any]:
    """What stands under "echo" in a speculative configuration."""
    return parse_speculative_config(str(path)).get("echo", {})


def _tuning(path: Path | None) -> Tuning:
    if path is None:
        return Tuning()
    options = _options(path)
    known = {key: options[key] for key in ("calibration", "gates") if key in options}
    if "calibration" not in known:
        raise ValueError(f"--calibration: {path} has no echo.calibration")
    largest: dict[str, Any] = {"num_speculative_tokens": 255, "max_depth": 255}
    config = EchoConfig.from_dict(largest | known)
    return Tuning(config.calibration, config.gates if "gates" in known else None)


def _curve(path: Path) -> CostCurve:
    options = _options(path)
    if "profile" not in options:
        raise ValueError(f"--curve: {path} has no echo.profile; write it with `vllm-echo profile`")
    return CostCurve.from_dict(options["profile"], "echo.profile")


def _description(study: Study) -> str:
    recorded, tuning, args = study.recorded, study.tuning, study.args
    trace = recorded.trace
    lengths = recorded.chain_lengths()[recorded.num_left > recorded.max_depth]
    at_least = [f"{np.mean(lengths >= depth):.2f}" for depth in range(1, recorded.max_depth + 1)]
    start = (
        f"{args.requests_per_slot} requests a slot, from first to last"
        if args.requests_per_slot
        else f"closed loop, at least {args.steps} steps, seed {args.seed}"
    )
    return (
        f"Trace: {trace.num_requests} requests, {trace.num_roots} roots, trees of depth "
        f"{recorded.max_depth}, top-k {recorded.top_k}, {recorded.num_nodes} nodes; the likeliest "
        f"chain is accepted to depth 1, 2, ... in {', '.join(at_least)} of the roots.\n"
        f"{'Calibrated' if tuning.calibration else 'Uncalibrated'}; {start}; prompts "
        f"{'cost rows' if args.prefill else 'are free'}."
    )


def _assumptions(gpus: Gpus, context: float) -> str:
    return (
        f"{gpus.count} x {gpus.name}: {gpus.reached_bytes:.0%} of {gpus.bytes_per_s / 1e12:.2f} "
        f"TB/s, {gpus.reached_flops:.0%} of {gpus.flops_per_s / 1e12:.0f} TFLOPS, dense products "
        f"bound by arithmetic from {gpus.knee_rows():.0f} rows; {gpus.all_reduce_us:.0f} us an "
        f"all-reduce, {gpus.layer_us:.0f} us a layer, {gpus.host_us / 1000:.1f} ms of host a step, "
        f"{gpus.draft_host_us / 1000:.2f} ms a draft forward; {context:.0f} tokens of context."
    )


def _write(
    args: argparse.Namespace,
    gpus: Gpus,
    context: float,
    trace: DraftTrace,
    by_model: Mapping[str, Results],
) -> None:
    written: dict[str, Any] = {
        "arguments": {key: str(value) for key, value in vars(args).items()},
        "trace": {"requests": trace.num_requests, "roots": trace.num_roots},
        "results": {
            model: {
                name: {str(batch): asdict(result) for batch, result in by_batch.items()}
                for name, by_batch in table.items()
            }
            for model, table in by_model.items()
        },
    }
    if not args.curve:
        written["gpus"] = asdict(gpus)
        written["plain_step_us"] = {
            model: {
                str(batch): vars(step_parts(gpus, MODELS[model], batch, batch, context))
                for batch in args.batch
            }
            for model in by_model
        }
        written["curves"] = {
            model: {
                str(batch): cost_curve(gpus, MODELS[model], batch, context).to_dict()
                for batch in args.batch
            }
            for model in by_model
        }
    args.output.write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
