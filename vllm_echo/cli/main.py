# SPDX-License-Identifier: Apache-2.0
"""The `vllm-echo` command: patch, doctor, demo, calibrate, profile.

Exit status: 0 done, 1 a question answered with no (status: not applied; doctor: could not serve),
2 an error, with one message on stderr, 3 nothing to do (a patch set that is applied already).
Nothing heavy is imported before a command needs it.
"""

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from vllm_echo.errors import EchoError
from vllm_echo.version import __version__

EXIT_NO = 1
EXIT_ERROR = 2
EXIT_NOTHING_TO_DO = 3

Command = Callable[[argparse.Namespace], int]
Options = TypeVar("Options")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run one command, and turn our errors into one message."""
    args = build_parser().parse_args(argv)
    command: Command = args.command
    try:
        status = command(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # somebody read the first lines only
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except EchoError as error:
        print(f"vllm-echo: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("vllm-echo: interrupted; run the same command again to go on", file=sys.stderr)
        return 128 + 2  # what a shell reports for SIGINT


def build_parser() -> argparse.ArgumentParser:
    """All commands and options; nothing is imported for them yet."""
    parser = argparse.ArgumentParser(
        prog="vllm-echo", description="Elastic tree speculative decoding (ECHO) for vLLM."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_patch(commands)
    _add_doctor(commands)
    _add_demo(commands)
    _add_calibrate(commands)
    _add_profile(commands)
    return parser


def _add_patch(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    patch = commands.add_parser("patch", help="apply, revert or look at the patches in vLLM")
    actions = patch.add_subparsers(metavar="ACTION", required=True)
    for name, summary, command in (
        ("apply", "patch the installed vLLM", _patch_apply),
        ("revert", "bring the published files back", _patch_revert),
    ):
        action = actions.add_parser(name, help=summary)
        action.add_argument(
            "--if-needed",
            action="store_true",
            help="succeed when it is done already, and finish what was interrupted or is outdated",
        )
        action.set_defaults(command=command)
    status = actions.add_parser("status", help="say what state the patches are in")
    status.add_argument("--json", action="store_true", help="one JSON object on stdout")
    status.set_defaults(command=_patch_status)


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    doctor = commands.add_parser("doctor", help="check that this machine can serve with echo")
    doctor.add_argument("--json", action="store_true", help="one JSON object on stdout")
    doctor.add_argument("--dir", type=Path, help="where the demo models are (see demo)")
    doctor.set_defaults(command=_doctor)


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    demo = commands.add_parser(
        "demo",
        help="prepare the demo model, its draft head and an echo.json",
        description="Prepares only what is missing. The last line on stdout is one JSON object "
        "with the keys model, draft and speculative_config; progress goes to stderr.",
    )
    demo.add_argument("--dir", type=Path, help="default: ~/.cache/vllm-echo/demo (XDG_CACHE_HOME)")
    demo.set_defaults(command=_demo)


def _add_calibrate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="fit gates and acceptance to a head, with prompts",
        description="Answers the prompts once, verifying nothing, so that every output position "
        "tells what the head drafted and whether it was right; fits gates and acceptance, and "
        "writes them into an echo.json, with a report and a picture beside it. Interrupted, the "
        "same command goes on.",
    )
    _add_engine_options(calibrate)
    add = calibrate.add_argument
    add("--prompts", type=Path, required=True, help="JSON lines with prompt, question or turns")
    add("--limit", type=_positive, help="only the first so many prompts")
    add("--max-depth", type=_positive, default=6, help="deepest layer to draft (6)")
    add("--target-depth", type=_positive, default=4, help="where a gate always stands (4)")
    add("--top-k", type=_positive, default=3, help="children of a node (3)")
    add("--output-tokens", type=_positive, default=160, help="most tokens of an answer (160)")
    add("--batch", type=_positive, default=16, help="prompts answered together (16)")
    add(
        "--concurrency",
        type=_positive,
        default=4,
        help="requests for which gates are fitted, by the profile in the output file (4)",
    )
    add("--seed", type=int, default=0, help="of the sampled half (0)")
    add("--work", type=Path, help="where collected pieces are kept (beside the output)")
    add("--use-collected", action="store_true", help="fit what is there, collect nothing more")
    add("--keep-work", action="store_true", help="do not remove the collected pieces at the end")
    calibrate.set_defaults(command=_calibrate)


def _add_profile(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    profile = commands.add_parser(
        "profile",
        help="measure what steps cost on this machine",
        description="Measures step times over batch sizes, budgets and depths through the engine, "
        "and writes the cost curve and K_max into an echo.json, with a picture beside it. Run "
        "it with nothing else on the machine.",
    )
    _add_engine_options(profile)
    profile.add_argument(
        "--max-requests", type=_positive, default=64, help="largest batch to measure (64)"
    )
    profile.set_defaults(command=_profile)


def _add_engine_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", required=True, help="the served model")
    command.add_argument("--draft", help="its EAGLE-3 head; optional when the output names it")
    command.add_argument("--output", type=Path, required=True, help="the echo.json to write into")
    command.add_argument("--dtype", default="auto", help="as vLLM's --dtype")
    command.add_argument("--max-model-len", type=_positive, help="as vLLM's --max-model-len")
    command.add_argument(
        "--enforce-eager",
        action="store_true",
        help="as vLLM's --enforce-eager: starts sooner, runs slower",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0; give 1 or more")
    return int(text)


def _calibrate(args: argparse.Namespace) -> int:
    from vllm_echo.calibration.calibrate_command import CalibrateOptions, run_calibrate

    return run_calibrate(_options(CalibrateOptions, args))


def _profile(args: argparse.Namespace) -> int:
    from vllm_echo.calibration.profile_command import ProfileOptions, run_profile

    return run_profile(_options(ProfileOptions, args))


def _options(cls: type[Options], args: argparse.Namespace) -> Options:
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    return cls(**{name: getattr(args, name) for name in names})


def _patch_apply(args: argparse.Namespace) -> int:
    from vllm_echo.integration import patch_set, patching

    return _change(patching.apply_patches, args, patch_set.load_patch_set)


def _patch_revert(args: argparse.Namespace) -> int:
    from vllm_echo.integration import patch_set, patching

    return _change(patching.revert_patches, args, patch_set.load_patch_set)


def _change(
    action: Callable[..., str], args: argparse.Namespace, load: Callable[[], object]
) -> int:
    from vllm_echo.integration import patching

    try:
        print(action(patching.find_installation(), load(), if_needed=args.if_needed))
    except patching.AlreadyDoneError as error:
        print(f"vllm-echo: {error}", file=sys.stderr)
        return EXIT_NOTHING_TO_DO
    return 0


def _patch_status(args: argparse.Namespace) -> int:
    from vllm_echo.integration import patch_set, patching

    installation = patching.find_installation()
    patches = patch_set.load_patch_set()
    status = patching.read_status(installation, patches)
    if args.json:
        report = {
            "state": status.state,
            "remedy": status.remedy,
            "vllm": {
                "distribution": installation.distribution,
                "version": installation.version,
                "path": str(installation.root / "vllm"),
            },
            "patches": list(patches.names),
            "files": status.files,
        }
        print(json.dumps(report))
    else:
        print(f"{installation.distribution} {installation.version} in {installation.root}")
        for path, state in status.files.items():
            print(f"  {state:9} {path}")
        print(f"patches: {status.state}" + (f"; {status.remedy}" if status.remedy else ""))
    return 0 if status.state == patching.APPLIED else EXIT_NO


def _doctor(args: argparse.Namespace) -> int:
    from vllm_echo.cli.doctor import run_doctor

    return run_doctor(args.dir, as_json=args.json)


def _demo(args: argparse.Namespace) -> int:
    from vllm_echo.cli.demo import run_demo

    return run_demo(args.dir)


if __name__ == "__main__":
    sys.exit(main())
