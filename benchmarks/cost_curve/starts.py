# SPDX-License-Identifier: Apache-2.0
"""Does every start come to the same budget, on a machine with another process coming and going?

    .venv/bin/python -m benchmarks.cost_curve.starts [--starts 12]

The server is started again and again, each time with no stored cost curve, while another process
takes a core for some seconds and leaves it for some. Prints K_max at a few loads by each start's
curve, and whether it was stored; the exit status is 1 when stored ones differ by more than 20 %.
"""

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.cost_curve import add_pair, pair_of
from benchmarks.serving.engines import ECHO_SERVER
from benchmarks.serving.fleet import Fleet, free_ports
from benchmarks.serving.servers import Serving
from vllm_echo.core.budget import ElasticBudget
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import StepLoad
from vllm_echo.core.policies import make_policy

BUSY_SECONDS = (2.0, 12.0)
IDLE_SECONDS = (2.0, 20.0)
CONTEXT_TOKENS = 200
SPREAD = 1.2
SERVER_BYTES = 2 << 30


def come_and_go(seed: int) -> None:
    """Computes for some seconds on whatever core the system gives it, sleeps for some, for ever."""
    chance = random.Random(seed)
    while True:
        end = time.monotonic() + chance.uniform(*BUSY_SECONDS)
        while time.monotonic() < end:
            sum(range(10_000))
        time.sleep(chance.uniform(*IDLE_SECONDS))


@contextmanager
def visitor(seed: int) -> Iterator[None]:
    process = multiprocessing.Process(target=come_and_go, args=(seed,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def start_once(
    model: str, config: Mapping[str, Any], folder: Path
) -> tuple[Mapping[str, Any], bool]:
    """Echo's options as a server with an empty cache settles them, and whether it kept a curve."""
    folder.mkdir()
    os.environ["VLLM_ECHO_CACHE"] = str(folder)
    serving = Serving(model, "bfloat16", 2048, 64, 512 << 20)
    with Fleet() as fleet:
        port = free_ports(1)
        fleet.start({ECHO_SERVER: config}, serving, port, folder, 1, SERVER_BYTES, lambda _: None)
        server = fleet.servers[ECHO_SERVER]
        server.go_on()
        options = server.given_options()
    return options, any((folder / "profiles").glob("*.json"))


def budgets(options: Mapping[str, Any], loads: Sequence[int]) -> list[int]:
    """K_max at ``loads`` by the curve alone, before any of it is corrected."""
    budget = make_policy(EchoConfig.from_dict(options)).budget
    assert isinstance(budget, ElasticBudget), 'k_max is "auto", and the curve is there'
    return [budget.offer(StepLoad(n, 0, n * CONTEXT_TOKENS)).num_nodes for n in loads]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_pair(parser)
    parser.add_argument("--starts", type=int, default=12)
    parser.add_argument("--loads", nargs="+", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--judged", nargs="+", type=int, default=[16, 32], help="of the loads")
    parser.add_argument("--alone", action="store_true", help="with nothing coming and going")
    options = parser.parse_args()
    model, config = pair_of(parser, options)
    folder = Path(tempfile.mkdtemp(prefix="starts-"))
    print(f"logs in {folder}", file=sys.stderr)
    print(f"| start | stored | {' | '.join(f'K_max at {n}' for n in options.loads)} |")
    print("|---" * (2 + len(options.loads)) + "|")
    kept: list[list[int]] = []
    for number in range(options.starts):
        if options.alone:
            settled, stored = start_once(model, config, folder / str(number))
        else:
            with visitor(number):
                settled, stored = start_once(model, config, folder / str(number))
        found = budgets(settled, options.loads)
        kept += [found] if stored else []
        words = ["yes" if stored else "no", *map(str, found)]
        print(f"| {number + 1} | {' | '.join(words)} |", flush=True)
    places = [options.loads.index(n) for n in options.judged]
    apart = any(max(k[p] for k in kept) > SPREAD * min(k[p] for k in kept) for p in places if kept)
    return int(apart)


if __name__ == "__main__":
    sys.exit(main())
