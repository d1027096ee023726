# SPDX-License-Identifier: Apache-2.0
"""`vllm-echo calibrate`: from prompts to gates and an acceptance model in echo.json."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_echo.cache import fingerprint
from vllm_echo.calibration import fit
from vllm_echo.calibration.collect import Piece, WorkFolder, collect, plan_pieces
from vllm_echo.calibration.echo_file import check_writable, read_echo_file, write_echo_file
from vllm_echo.calibration.prompts import read_prompts
from vllm_echo.calibration.report import CalibrationReport, plot_confidences
from vllm_echo.core.acceptance import KINDS, AcceptanceModel, Calibration
from vllm_echo.core.config import (
    AUTO,
    DEFAULT_GATES,
    MAX_NODES_PER_REQUEST,
    EchoConfig,
    Gate,
    default_policy,
)
from vllm_echo.core.cost import CostCurve, StepLoad
from vllm_echo.core.trace import DraftTrace
from vllm_echo.errors import EchoError

HELD_OUT_EVERY = 4
"""Every fourth request checks the fit and takes no part in it."""
_HOPELESS = 0.05
"""Acceptance probability: a head none of whose candidates is likelier and ever right."""


@dataclass(frozen=True)
class CalibrateOptions:
    """The command's options; ``cli.py`` documents them."""

    model: str
    draft: str | None
    prompts: Path
    output: Path
    limit: int | None
    max_depth: int
    top_k: int
    target_depth: int
    output_tokens: int
    batch: int
    concurrency: int
    seed: int
    dtype: str
    max_model_len: int | None
    enforce_eager: bool
    work: Path | None
    use_collected: bool
    keep_work: bool


def run_calibrate(options: CalibrateOptions) -> int:
    """Collect, fit, write echo.json, a report and a picture beside it."""
    check_writable(options.output)
    content = read_echo_file(options.output, options.draft)
    _prepare(content, options)
    questions = read_prompts(options.prompts, options.limit)
    pieces = plan_pieces(questions, options.batch)
    folder = WorkFolder(
        options.work or options.output.with_suffix(".calibration"),
        _inputs(options, content, questions),
    )
    if not options.use_collected and not all(folder.has(piece) for piece in pieces):
        _collect(options, content, folder, pieces)
    loaded = {kind: folder.load(kind, pieces) for kind in KINDS}
    traces = {kind: trace for kind, trace in loaded.items() if trace is not None}
    if len(traces) < len(KINDS):
        raise EchoError(
            f"calibrate: {folder.path} holds nothing yet; collect without --use-collected"
        )
    report = _fit_into(content, traces, options)
    write_echo_file(options.output, content)
    text = report.markdown()
    options.output.with_suffix(".calibration.md").write_text(text, encoding="utf-8")
    table = fit.LayerTable(traces["greedy"])
    plot_confidences(
        options.output.with_suffix(".calibration.png"),
        report.title,
        table,
        report.gates,
        [s.auc for s in report.statistics],
    )
    if not options.keep_work and all(folder.has(piece) for piece in pieces):
        folder.remove()
    print(text)
    print(f"[vllm-echo] wrote {options.output}, its .calibration.md and .calibration.png")
    return 0


def _inputs(
    options: CalibrateOptions, content: dict[str, Any], questions: list[str]
) -> dict[str, Any]:
    return {
        "model": options.model,
        "draft": content["model"],
        "prompts": fingerprint(questions),
        "max_depth": options.max_depth,
        "top_k": options.top_k,
        "output_tokens": options.output_tokens,
        "batch": options.batch,
        "seed": options.seed,
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        **({"enforce_eager": True} if options.enforce_eager else {}),
    }


def _collect(
    options: CalibrateOptions, content: dict[str, Any], folder: WorkFolder, pieces: list[Piece]
) -> None:
    from tqdm import tqdm

    from vllm_echo.integration.offline import OfflineEngine

    engine_args: dict[str, Any] = {
        "dtype": options.dtype,
        "max_num_seqs": options.batch,
        "enforce_eager": options.enforce_eager,
    }
    if options.max_model_len is not None:
        engine_args["max_model_len"] = options.max_model_len
    tree = {
        "policy": "static",
        "k_max": 0,
        "max_depth": options.max_depth,
        "target_depth": options.max_depth,
        "top_k": options.top_k,
        "gates": [],
    }
    num_nodes = _num_recorded(options)
    engine = OfflineEngine(options.model, content["model"], tree, num_nodes, engine_args)
    room = engine.max_model_len - options.output_tokens - num_nodes - 4
    # What was there before this run says nothing about the time that is left.
    there = sum(folder.has(piece) for piece in pieces)
    bar = tqdm(total=len(pieces), initial=there, unit="piece", file=sys.stderr, desc="collecting")

    def record(piece: Piece) -> DraftTrace:
        prompts = [engine.chat_tokens(question, room) for question in piece.questions]
        temperature = 0.0 if piece.kind == "greedy" else 1.0
        seed = options.seed + 1000 * piece.index
        return engine.record(prompts, temperature, options.output_tokens, seed)

    def progress(done: int, _: int) -> None:
        bar.update(done - bar.n)

    try:
        if room < 1:
            raise EchoError(
                f"--output-tokens: {options.output_tokens} leaves no room for a prompt, since the "
                f"model's length is {engine.max_model_len}; lower it, or raise --max-model-len"
            )
        collect(folder, pieces, record, progress)
    finally:
        bar.close()
        engine.close()


def _num_recorded(options: CalibrateOptions) -> int:
    """Slots for every node that a layer of top_k expands, so that no layer is narrowed."""
    return 1 + options.top_k * (options.max_depth - 1)


def _fit_into(
    content: dict[str, Any], traces: dict[str, DraftTrace], options: CalibrateOptions
) -> CalibrationReport:
    """Put gates and calibration into ``content``; returns what there is to say about them."""
    config = EchoConfig.from_speculative_config(content)
    # What lies deeper than trees are served is of no use to them.
    split = {
        kind: split_requests(_up_to(trace, config.max_depth), HELD_OUT_EVERY)
        for kind, trace in traces.items()
    }
    models: dict[str, AcceptanceModel] = {}
    errors, remarks = {}, []
    for kind, (seen, unseen) in split.items():
        try:
            models[kind] = fit.fit_acceptance(seen, config.num_speculative_tokens)
        except ValueError as error:
            raise EchoError(f"calibrate: {kind} requests: {error}") from None
        remarks += _remarks(kind, models[kind], seen.max_depth)
        errors[kind] = (
            fit.calibration_error(unseen, None),
            fit.calibration_error(unseen, models[kind]),
        )
        before, after = errors[kind]
        if after > before:
            remarks.append(
                f"{kind} requests: on held-out prompts the calibration errs more than the head's "
                f"word ({after:.3f} against {before:.3f}): give more prompts"
            )
    if config.profile is None:
        remarks.append(
            "the costs are assumed, since the file has no cost curve: run `vllm-echo profile` on "
            "it, then this command again"
        )
    costs = gate_costs(config.profile, options.concurrency, traces["greedy"])
    fitted, held_out = (fit.LayerTable(trace) for trace in split["greedy"])
    target_depth = min(options.target_depth, split["greedy"][0].max_depth - 1)
    gates, gate_remarks = fit.fit_gates(fitted, target_depth, costs)
    rules: dict[str, tuple[Gate, ...]] = {"fitted gates": gates, "default gates": DEFAULT_GATES}
    rules["no gates"] = ()
    echo = content["echo"]
    echo["gates"] = [{"depth": g.depth, "threshold": g.threshold} for g in gates]
    echo["calibration"] = Calibration(**models).to_dict()
    remarks += _settle_budget(echo, models)
    return CalibrationReport(
        title=f"Calibration of {Path(content['model']).name} for {Path(options.model).name}",
        statistics=fit.LayerTable(traces["greedy"]).statistics(),
        gates=gates,
        remarks=[*gate_remarks, *remarks],
        costs=costs,
        fitted={name: fitted.outcome(rule, costs) for name, rule in rules.items()},
        held_out={name: held_out.outcome(rule, costs) for name, rule in rules.items()},
        calibration_error=errors,
    )


def _remarks(kind: str, model: AcceptanceModel, max_depth: int) -> list[str]:
    remarks = []
    if _is_hopeless(model):
        remarks.append(f"{kind} requests: nothing that the head drafted is worth verifying")
    fitted = len(model.curves)
    if fitted < max_depth:
        remarks.append(
            f"{kind} requests: too few candidates could be judged at depth {fitted + 1}; from "
            f"there on the curve of depth {fitted} is used"
        )
    return remarks


def _is_hopeless(model: AcceptanceModel) -> bool:
    return not any(point.accepted for point in model.supply if point.price >= _HOPELESS)


def _settle_budget(echo: dict[str, Any], models: dict[str, AcceptanceModel]) -> list[str]:
    """A head that is never right drafts nothing: the budget sees to it, since a closed root gate
    still leaves the first layer to it. An "auto" budget follows from the calibration."""
    hopeless = all(_is_hopeless(model) for model in models.values())
    k_max = echo.get("k_max", AUTO)
    if hopeless and k_max != AUTO:
        k_max = echo["k_max"] = 0
    if hopeless:
        return [f'nothing will be drafted ("k_max" is {json.dumps(k_max)})']
    if k_max == 0:
        return ['nothing will be drafted, since "k_max" is 0: set it, or run `vllm-echo profile`']
    return []


def _up_to(trace: DraftTrace, max_depth: int) -> DraftTrace:
    """The trace without its candidates beyond ``max_depth``."""
    kept = trace.depths <= max_depth
    return replace(
        trace,
        tokens=trace.tokens[:, kept],
        parents=trace.parents[:, kept],
        log_probs=trace.log_probs[:, kept],
        depths=trace.depths[kept],
    )


def _prepare(content: dict[str, Any], options: CalibrateOptions) -> None:
    """Put in the depths that are measured, as far as the file does not say otherwise, and take
    the old gates out. Raises EchoError where that does not go together."""
    if _num_recorded(options) > MAX_NODES_PER_REQUEST:
        raise EchoError(
            f"--top-k: {options.top_k} with --max-depth {options.max_depth} takes "
            f"{_num_recorded(options)} draft slots of a request, and there are "
            f"{MAX_NODES_PER_REQUEST}; lower one of them"
        )
    echo = content["echo"]
    num_nodes = content.setdefault("num_speculative_tokens", EchoConfig.num_speculative_tokens)
    echo.setdefault("max_depth", min(options.max_depth, num_nodes))
    echo.setdefault("target_depth", min(options.target_depth, echo["max_depth"]))
    echo.setdefault("top_k", options.top_k)
    echo.setdefault("policy", default_policy(echo))  # fitted gates are no choice of policy
    echo["gates"] = []
    EchoConfig.from_speculative_config(content)


def gate_costs(profile: CostCurve | None, concurrency: int, trace: DraftTrace) -> fit.GateCosts:
    """Costs at ``concurrency`` requests with contexts like those of ``trace`` by the profile, or
    the defaults without one."""
    if profile is None:
        return fit.GateCosts()
    load = StepLoad(concurrency, 0, round(concurrency * float(trace.context.mean())))
    share = profile.plain_ms(load) / concurrency
    node = profile.nodes_ms(load, concurrency) / concurrency / share
    layer = (profile.layer.fixed / concurrency + profile.layer.each) / share
    return fit.GateCosts(round(node, 4), round(layer, 4))


def split_requests(trace: DraftTrace, every: int) -> tuple[DraftTrace, DraftTrace]:
    """(all but every ``every``-th request, those); all for both when there are too few."""
    held_out = trace.requests % every == every - 1
    if not held_out.any() or held_out.all():
        return trace, trace
    return trace.select(~held_out), trace.select(held_out)
