# SPDX-License-Identifier: Apache-2.0
"""Does a machine of two cores gain when the engine process naps and the worker takes both?

    .venv/bin/python -m benchmarks.second_core --speculative-config echo.json [--data FOLDER]

Servers of plain decoding and of echo for every way of using the cores, loaded together and taking
turns: the others are halted meanwhile. Prints tokens a second, and the CPU seconds that the engine
process and the worker took for each second. Echo measures its own cost curve under every way, so
nothing else may run, and needs a configuration without `echo.profile`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.client import Load, send
from benchmarks.serving.datasets import Prompts, load_lines, question_of
from benchmarks.serving.errors import BenchmarkError
from benchmarks.serving.fleet import Fleet, free_ports
from benchmarks.serving.servers import MODEL_NAME, Server, Serving

PASSIVE = ("--distributed-executor-backend", "vllm_echo.integration.cpu.executor.PassiveExecutor")
TWO_UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2", "KMP_TPAUSE": "0"}
OPENMP = ("OMP_", "KMP_", "GOMP_", "VLLM_CPU_OMP_")
TICKS = os.sysconf("SC_CLK_TCK")
SERVER_BYTES = 2 << 30


@dataclass(frozen=True)
class Way:
    """How the processes of a server use the cores."""

    environment: Mapping[str, str]
    arguments: Sequence[str] = ()


WAYS = {
    "1 thread, spin": Way({}),
    "1 thread, passive": Way({}, PASSIVE),
    "2 threads, spin": Way({"VLLM_CPU_OMP_THREADS_BIND": "0-1"}),
    "2 threads, passive": Way({"VLLM_CPU_OMP_THREADS_BIND": "0-1"}, PASSIVE),
    "2 unbound, blocktime 1": Way({**TWO_UNBOUND, "KMP_BLOCKTIME": "1"}, PASSIVE),
    "2 unbound, blocktime 0": Way({**TWO_UNBOUND, "KMP_BLOCKTIME": "0"}, PASSIVE),
    "1 thread, huge pages": Way({"THP_MEM_ALLOC_ENABLE": "1"}),
}
"""The first is how vLLM starts. Bound threads look for work for 5 ms (vLLM sets it)."""
DEFAULT_WAYS = [
    "1 thread, spin",
    "1 thread, passive",
    "2 threads, passive",
    "2 unbound, blocktime 1",
]
"""Eight servers, which fit into 20 GiB."""


@dataclass(frozen=True)
class ServingThisWay(Serving):
    arguments: tuple[str, ...] = ()

    def command(
        self,
        port: int,
        speculative_config: Mapping[str, Any] | None,
        options: Sequence[str] = (),
    ) -> list[str]:
        return super().command(port, speculative_config, (*options, *self.arguments))


@contextmanager
def environment(way: Way, cache: Path) -> Iterator[None]:
    """What a server that is started now inherits; the cost curves of ways are kept apart."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(OPENMP):
            del os.environ[name]
    os.environ.update(way.environment, VLLM_ECHO_CACHE=str(cache))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def cpu_seconds(server: Server) -> dict[str, float]:
    """By the name of a process."""
    seconds: dict[str, float] = defaultdict(float)
    for pid in server.pids:
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        seconds[name] += (int(fields[11]) + int(fields[12])) / TICKS
    return seconds


def measure(server: Server, load: Load) -> dict[str, float]:
    server.go_on()
    try:
        before = cpu_seconds(server)
        result = send(server.url, MODEL_NAME, load)
        after = cpu_seconds(server)
    finally:
        server.halt()

    def busy(process: str) -> float:
        took = sum(after[name] - before[name] for name in after if process in name)
        return took / result["seconds"]

    return {
        "tokens_per_second": result["tokens_per_second"],
        "engine": busy("EngineCor"),  # Linux keeps 15 letters of a name
        "worker": busy("Worker"),
    }


def start(fleet: Fleet, options: argparse.Namespace, folder: Path) -> None:
    config = json.loads(Path(options.speculative_config).read_text())
    if "profile" in config.get("echo", {}):
        raise BenchmarkError("--speculative-config: has echo.profile, which holds for one way only")
    config["model"] = str(Path(config["model"]).resolve())
    port = free_ports(2 * len(options.ways))
    for number, name in enumerate(options.ways):
        print(f"starting plain and echo, {name}", file=sys.stderr, flush=True)
        serving = ServingThisWay(
            options.model,
            "bfloat16",
            max_model_len=2048,
            max_num_seqs=max(options.loads),
            kv_bytes=options.kv_mib << 20,
            arguments=tuple(WAYS[name].arguments),
        )
        with environment(WAYS[name], folder / f"cache-{number}"):
            fleet.start(
                {f"plain, {name}": None, f"echo, {name}": config},
                serving,
                port,
                folder,
                1,
                SERVER_BYTES,
                lambda _: None,
            )


def run(options: argparse.Namespace) -> dict[tuple[int, str], list[dict[str, float]]]:
    lines = load_lines(options.data)
    prompts = Prompts({name: [question_of(line) for line in lines[name]] for name in lines})
    results: dict[tuple[int, str], list[dict[str, float]]] = defaultdict(list)
    folder = Path(tempfile.mkdtemp(prefix="second-core-"))
    print(f"logs in {folder}", file=sys.stderr)
    with Fleet() as fleet:
        start(fleet, options, folder)
        for round_ in range(-1, options.rounds):  # the first warms up and does not count
            for concurrency in options.loads:
                count = max(options.requests, 2 * concurrency) if round_ >= 0 else concurrency
                tokens = options.tokens if round_ >= 0 else 8
                start_at = max(0, round_) * count
                questions = prompts.starting_at(start_at)
                load = Load(questions, count, concurrency, tokens, 0.0, start_at)
                turns = list(fleet.servers)
                for name in turns if round_ % 2 else reversed(turns):
                    result = measure(fleet.servers[name], load)
                    if round_ >= 0:
                        results[concurrency, name].append(result)
                        print(concurrency, name, result, file=sys.stderr, flush=True)
    return results


def report(results: Mapping[tuple[int, str], Sequence[Mapping[str, float]]]) -> None:
    """Medians over the rounds; ratios to the same engine on one thread beside a spinning engine."""
    print("| requests | engine, way | tokens/s | to the first way | engine CPU | worker CPU |")
    print("|---|---|---|---|---|---|")
    first: dict[tuple[int, str], float] = {}
    for (concurrency, name), rounds in results.items():
        values = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        speed = values["tokens_per_second"]
        base = first.setdefault((concurrency, name.partition(",")[0]), speed)
        print(
            f"| {concurrency} | {name} | {speed:.1f} | {speed / base:.3f} | "
            f"{values['engine']:.2f} | {values['worker']:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True)
    parser.add_argument("--speculative-config", required=True, help="a file")
    parser.add_argument("--data", type=Path, help="a folder of question sets")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=DEFAULT_WAYS)
    parser.add_argument("--loads", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8, help="at the least, in a turn")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, on average")
    parser.add_argument("--kv-mib", type=int, default=512)
    options = parser.parse_args()
    results = run(options)
    order = {
        f"{engine}, {way}": i
        for i, (engine, way) in enumerate(
            (engine, way) for engine in ("plain", "echo") for way in options.ways
        )
    }
    report(dict(sorted(results.items(), key=lambda item: (item[0][0], order[item[0][1]]))))


if __name__ == "__main__":
    main()
