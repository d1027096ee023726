# SPDX-License-Identifier: Apache-2.0
"""Measure plain decoding, vLLM's own speculation and echo's policies through `vllm serve`.

    python -m benchmarks.serving --data eval/            # the sweep, hours
    python -m benchmarks.serving --quick                 # a small table, under ten minutes
    python -m benchmarks.serving --report-only --out F   # tables and pictures of folder F again

An interrupted run goes on when the same command is given again. Nothing else should run on the
machine meanwhile; the report says how busy it was. Plain decoding is always measured, in both
settings. A shorter sweep: fewer --loads, or smaller --requests, which make it less certain.
"""

import argparse
import json
import math
import signal
import sys
from pathlib import Path

from benchmarks.serving import client, datasets, plots, report, sizing
from benchmarks.serving.engines import Lineup, build_lineup, prepare_demo, read_config
from benchmarks.serving.errors import BenchmarkError
from benchmarks.serving.fleet import available_memory, free_ports
from benchmarks.serving.journal import Journal
from benchmarks.serving.plan import Sizes, Sweep, kv_tokens_needed, schedule, split_into_groups
from benchmarks.serving.provenance import provenance
from benchmarks.serving.run import Bench
from benchmarks.serving.servers import Serving, environment

PRESETS = {
    "full": {
        "engines": ["eagle3", "default", "echo"],
        "concurrency": [1, 2, 4, 8, 16, 32, 64],
        "temperature": [0.0],
        "rounds": 3,
        "output_tokens": 128,
        "requests": [12, 1, 96],
        "long": True,
        "minutes": None,
    },
    "quick": {
        "engines": ["eagle3-1", "eagle3-2", "eagle3-5", "default"],
        "concurrency": [1, 4, 16, 32],
        "temperature": [0.0],
        "rounds": 5,
        "output_tokens": 48,
        "requests": [4, 1, 32],
        "long": False,
        "minutes": 9.3,
    },
    "smoke": {
        "engines": ["eagle3-1", "default"],
        "concurrency": [1, 2],
        "temperature": [0.0],
        "rounds": 2,
        "output_tokens": 16,
        "requests": [2, 1, 4],
        "long": False,
        "minutes": None,
    },
}


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    try:
        run(args)
    except BenchmarkError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted; the same command goes on from here", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", dest="preset", action="store_const", const="quick", default="full")
    add("--smoke", dest="preset", action="store_const", const="smoke", help="does it work at all?")
    add("--out", type=Path, help="folder of results (bench-results/PRESET)")
    add("--fresh", action="store_true", help="do not go on with an interrupted run")
    add("--report-only", action="store_true", help="measure nothing")
    what = parser.add_argument_group("what is measured (defaults: by preset)")
    add = what.add_argument
    add("--engines", nargs="+", metavar="NAME", help="or all, default, eagle3, policies")
    add(
        "--extra",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "JSON"),
        help="one more engine: any speculative configuration of vLLM",
    )
    add("--loads", "--concurrency", dest="concurrency", type=int, nargs="+", metavar="C")
    add("--temperature", type=float, nargs="+")
    add("--rounds", type=int)
    add("--minutes", type=float, help="begin no further round that would end later")
    add(
        "--output-tokens",
        type=int,
        metavar="N",
        help="most tokens of an answer: from N/2 to 3N/2, evenly spread",
    )
    add(
        "--requests",
        type=float,
        nargs=3,
        metavar=("LEAST", "PER_SLOT", "MOST"),
        help="that a measurement waits for, however many run at a time",
    )
    add("--data", type=Path, help=f"folder with {', '.join(datasets.SETS)} (.jsonl)")
    add(
        "--long",
        action=argparse.BooleanOptionalAction,
        help=f"long prompts among them, of {' to '.join(map(str, datasets.LONG_TOKENS))} tokens, "
        "made of the folder's solved questions",
    )
    add("--by-dataset", action="store_true", help="every set apart, not mixed")
    add("--seed", type=int, default=0)
    serving = parser.add_argument_group("what serves")
    add = serving.add_argument
    add("--model", help="with --speculative-config; default: the demo pair")
    add("--speculative-config", help="echo's, inline or a file")
    add("--dtype", default="bfloat16")
    add("--max-model-len", type=int, default=4096)
    add("--kv-gib", type=float, help="KV cache of each server (default: by the prompts)")
    add("--port", type=int, help="of the first server, the others count on (default: free ones)")
    add("--servers", type=int, help="most servers at a time (default: by the free memory)")
    add("--start-at-once", type=int, default=2, help="servers that start at the same time")
    args = parser.parse_args()
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.out = args.out or Path("bench-results") / args.preset
    if (args.model is None) != (args.speculative_config is None):
        parser.error("--model and --speculative-config go together")
    if min(args.concurrency) < 1 or args.rounds < 1 or args.output_tokens < 1:
        parser.error("--loads, --rounds and --output-tokens are at least 1")
    return args


def run(args: argparse.Namespace) -> None:
    journal = Journal(args.out)
    if not args.report_only:
        measure(args, journal)
    if not journal.measurements:
        raise BenchmarkError(f"{journal.path} holds no measurements")
    journal.require_format()
    (args.out / "results.json").write_text(json.dumps(journal.to_dict(), indent=1))
    pictures = plots.draw_all(journal, args.out)
    text = report.render(journal, pictures)
    (args.out / "report.md").write_text(text)
    print(text)
    print(f"bench: results.json, report.md and pictures are in {args.out}", file=sys.stderr)


def measure(args: argparse.Namespace, journal: Journal) -> None:
    if args.fresh and journal.measurements:
        journal.complete = True  # `begin` puts it aside
    model, echo_config = args.model, None
    if model is None:
        model, echo_config = prepare_demo()
    else:
        echo_config = read_config(args.speculative_config)
    everything = build_lineup(echo_config, read_extra(args.extra))
    lineup = everything.select(args.engines)
    if "all" in args.engines or "policies" in args.engines:
        for name, reason in everything.skipped.items():
            print(f"bench: {name} is left out: {reason}", file=sys.stderr)

    sizes = Sizes(
        int(args.requests[0]), args.requests[1], int(args.requests[2]), args.output_tokens
    )
    tokenizer = datasets.load_tokenizer(model)
    sets, mean_tokens = datasets.cut_to_fit(
        choose_sets(args, tokenizer), tokenizer, args.max_model_len - output_limits(args)[1]
    )
    prompts = datasets.arrange(sets, args.by_dataset)
    kv = kv_size(args, model, mean_tokens)
    goes_on = bool(journal.measurements) and not journal.complete
    groups: list[list[str]] = journal.settings["groups"] if goes_on else []
    groups = groups or split_into_groups(list(lineup.servers), capacity(args, lineup, model, kv))
    settings = {
        "model": model,
        "default": lineup.default,
        "engines": {e.name: {"server": e.server, "changes": e.options} for e in lineup.engines},
        "servers": dict(lineup.servers),
        "groups": groups,
        "concurrency": args.concurrency,
        "temperature": args.temperature,
        "datasets": list(prompts),
        "prompts": datasets.fingerprint(sets),
        "mean_prompt_tokens": mean_tokens,
        "requests": args.requests,
        "output_tokens": args.output_tokens,
        "output_limits": output_limits(args),
        "seed": args.seed,
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
        "kv_bytes": kv,
        "skipped": dict(everything.skipped),
    }
    port = args.port or free_ports(max(len(group) for group in groups))
    slots = max(64, *args.concurrency)
    sampling = max(args.temperature) > 0
    serving = Serving(model, args.dtype, args.max_model_len, slots, kv, sampling)
    served = {"server": serving.command(port, None), "environment": settings_of_servers()}
    journal.begin(settings, provenance() | served)
    sweep = Sweep(args.rounds, args.temperature, list(prompts), args.concurrency)
    Bench(
        lineup=lineup,
        groups=groups,
        plan=schedule(lineup, groups, sweep),
        prompts=prompts,
        sizes=sizes,
        serving=serving,
        seed=args.seed,
        port=port,
        at_once=args.start_at_once,
        minutes=args.minutes,
        folder=args.out,
        journal=journal,
    ).run()


def choose_sets(args: argparse.Namespace, tokenizer: datasets.Tokenizer) -> dict[str, list[str]]:
    """Questions by set, the long prompts last."""
    lines = datasets.load_lines(args.data)
    sets = {name: [datasets.question_of(line) for line in of] for name, of in lines.items()}
    if args.long:
        prompts = datasets.long_prompts(lines, tokenizer)
        if prompts:
            sets[datasets.LONG] = prompts
        else:
            print(
                f"bench: no long prompts: they are made of {', '.join(datasets.LONG_SETS)} with "
                "solutions, in the folder that --data (make bench EVAL_DATA=...) names",
                file=sys.stderr,
            )
    return sets


def output_limits(args: argparse.Namespace) -> tuple[int, int]:
    """Most tokens of the shortest and of the longest answers."""
    return args.output_tokens // 2, math.ceil(client.LONGEST * args.output_tokens)


def settings_of_servers() -> dict[str, str]:
    """Environment variables that can change how a server performs."""
    kinds = ("VLLM_", "OMP_", "KMP_", "TORCHINDUCTOR_", "LD_PRELOAD")
    values = environment(Path("stages.json"))
    return {name: values[name] for name in sorted(values) if name.startswith(kinds)}


def read_extra(pairs: list[list[str]]) -> dict[str, dict]:
    try:
        return {name: json.loads(text) for name, text in pairs}
    except ValueError as error:
        raise BenchmarkError(f"--extra: no valid JSON: {error}") from None


def kv_size(args: argparse.Namespace, model: str, mean_tokens: dict[str, float]) -> int:
    if args.kv_gib is not None:
        return int(args.kv_gib * sizing.GIB)
    means = list(mean_tokens.values())
    mean = max(means) if args.by_dataset else sum(means) / len(means)
    needed = kv_tokens_needed(max(args.concurrency), mean, args.output_tokens)
    return sizing.kv_bytes(model, args.dtype, max(needed, 2 * args.max_model_len))


def capacity(args: argparse.Namespace, lineup: Lineup, model: str, kv: int) -> int:
    """Servers that the free memory holds."""
    config = next((c for c in lineup.servers.values() if c is not None), None)
    each = sizing.server_bytes(model, config, kv)
    room = (available_memory() - sizing.SPARE_BYTES) // each
    return min(room, args.servers) if args.servers else room


if __name__ == "__main__":
    sys.exit(main())
