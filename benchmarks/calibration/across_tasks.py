# SPDX-License-Identifier: Apache-2.0
"""Do gates that were fitted on one task set keep their gain on another?

    for set in mt_bench gsm8k ...; do
        vllm-echo calibrate --model M --draft H --prompts $set.jsonl --output $set.json --keep-work
    done
    python -m benchmarks.calibration.across_tasks --config echo.json mt_bench=mt_bench.calibration

Gates are fitted on each set and judged on every set, by expected tokens per time (1 is plain
decoding) at the costs of ``--config``'s profile, as `vllm-echo calibrate` judges them. A cell on
the diagonal was fitted on what it is judged by.
"""

import argparse
import json
from pathlib import Path

from vllm_echo.calibration import fit
from vllm_echo.calibration.calibrate_command import gate_costs
from vllm_echo.core.config import DEFAULT_GATES, EchoConfig
from vllm_echo.core.trace import DraftTrace


def load_trace(folder: Path) -> DraftTrace:
    """The greedy pieces that ``--keep-work`` left in ``folder``."""
    pieces = sorted(folder.glob("greedy-*.npz"))
    if not pieces:
        raise SystemExit(f"{folder} holds no greedy-*.npz; calibrate with --keep-work")
    return DraftTrace.join([DraftTrace.load(piece) for piece in pieces])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--config", type=Path, required=True, help="an echo.json with a profile")
    parser.add_argument("--concurrency", type=int, default=4)
    args = parser.parse_args()
    config = EchoConfig.from_speculative_config(json.loads(args.config.read_text()))
    traces = {}
    for entry in args.sets:
        name, _, folder = entry.partition("=")
        traces[name] = load_trace(Path(folder))
    costs = gate_costs(config.profile, args.concurrency, DraftTrace.join([*traces.values()]))
    tables = {name: fit.LayerTable(trace) for name, trace in traces.items()}
    rules = {"the file's gates": config.gates, "default gates": DEFAULT_GATES, "no gates": ()}
    for name, table in tables.items():
        target_depth = min(config.target_depth, table.confidence.shape[1] - 1)
        rules[f"fitted on {name}"] = fit.fit_gates(table, target_depth, costs)[0]
    print(
        f"At {args.concurrency} requests: a node costs {costs.node:.3f} and a layer "
        f"{costs.layer:.3f} of a request's share of a plain step.\n"
    )
    print("| gates | " + " | ".join(tables) + " | thresholds by depth |")
    print("|---|" + "---|" * (len(tables) + 1))
    for rule, gates in rules.items():
        gains = [f"{table.outcome(gates, costs).objective:.3f}" for table in tables.values()]
        shown = ", ".join(f"{gate.depth}: {gate.threshold:g}" for gate in gates)
        print(f"| {rule} | " + " | ".join(gains) + f" | {shown} |")


if __name__ == "__main__":
    main()
