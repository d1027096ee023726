# SPDX-License-Identifier: Apache-2.0
"""What is compared: engines, and the servers that they run on.

An engine is one line of a table. All of echo's policies share one server, which is switched
between measurements; every other engine has a server of its own.

Plain decoding is served twice, as vLLM starts it and with `--no-async-scheduling`, so that nothing
is won against the worse of two settings: what speculates runs without asynchronous scheduling,
which is vLLM's default where the platform has it. Both are in every selection and every group of
servers; ratios are to the better of the two (results.py).
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.serving.errors import BenchmarkError
from vllm_echo.core.config import AUTO, default_policy, is_echo_request

PLAIN: Mapping[str, tuple[str, ...]] = {"none": (), "none-sync": ("--no-async-scheduling",)}
"""Plain decoding: options of `vllm serve` by name. What a run is compared with."""
ECHO_SERVER = "echo"
EAGLE3_TOKENS = (1, 2, 3, 4, 5)
POLICIES = ("goodput", "echo", "dense", "fixed-threshold", "static", "ddd", "chain")
ABLATIONS: dict[str, dict[str, Any]] = {
    "echo-no-transfer": {"policy": "echo", "transfer": False},
    "echo-no-width": {"policy": "echo", "width": False},
}
# The example of vLLM's documentation, "N-Gram Speculation".
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}


@dataclass(frozen=True)
class Engine:
    """One line of a table."""

    name: str
    server: str
    options: Mapping[str, Any] | None = None
    """Echo options that differ from those that its server was started with."""


@dataclass(frozen=True)
class Lineup:
    """Engines in the order of the tables, and a speculative configuration for each server."""

    engines: tuple[Engine, ...]
    servers: Mapping[str, Mapping[str, Any] | None]
    """None for the servers of ``PLAIN``."""
    default: str | None
    """The engine that serves the given configuration as it is."""
    skipped: Mapping[str, str]
    """Engines that cannot run, and why."""

    def engine(self, name: str) -> Engine:
        return next(engine for engine in self.engines if engine.name == name)

    def select(self, names: Iterable[str]) -> "Lineup":
        """Only the engines named, and plain decoding. "all", "default", "eagle3" and "policies"
        stand for several."""
        known = [engine.name for engine in self.engines]
        wanted = set(PLAIN)
        for name in names:
            chosen = [engine for engine in known if _stands_for(name, engine, self)]
            if not chosen:
                reason = self.skipped.get(name, f"choose from {', '.join(known)}")
                raise BenchmarkError(f"--engines: {name} cannot be measured: {reason}")
            wanted.update(chosen)
        engines = tuple(engine for engine in self.engines if engine.name in wanted)
        servers = {engine.server: self.servers[engine.server] for engine in engines}
        default = self.default if self.default in wanted else None
        return replace(self, engines=engines, servers=servers, default=default)


def _stands_for(name: str, engine: str, lineup: Lineup) -> bool:
    if name == "all":
        return True
    if name == "default":
        return engine == lineup.default
    if name == "eagle3":
        return engine.startswith("eagle3-")
    if name == "policies":
        return lineup.engine(engine).server == ECHO_SERVER
    return engine == name


def build_lineup(
    echo_config: Mapping[str, Any], extra: Mapping[str, Mapping[str, Any]] | None = None
) -> Lineup:
    """Everything that can be compared with the given echo configuration; ``extra`` are further
    speculative configurations by name."""
    options = echo_config.get("echo") or {}
    default = options.get("policy") or default_policy(options)
    measures_profile = needs_quiet_start(echo_config)
    servers: dict[str, Mapping[str, Any] | None] = dict.fromkeys(PLAIN)
    for tokens in EAGLE3_TOKENS:
        servers[f"eagle3-{tokens}"] = {
            "method": "eagle3",
            "model": echo_config["model"],
            "num_speculative_tokens": tokens,
        }
    servers["ngram"] = NGRAM
    for name, config in (extra or {}).items():
        if name in (*servers, *POLICIES, *ABLATIONS):
            raise BenchmarkError(f"--extra: {name} is an engine already; choose another name")
        servers[name] = config
    engines = [Engine(name, name) for name in servers]
    servers[ECHO_SERVER] = echo_config
    skipped = {}
    for name, changes in {**{p: {"policy": p} for p in POLICIES}, **ABLATIONS}.items():
        if changes["policy"] == "goodput" and not (options.get("profile") or measures_profile):
            skipped[name] = "the configuration has no profile; `vllm-echo profile` writes one"
            continue
        engines.append(Engine(name, ECHO_SERVER, changes))
    return Lineup(tuple(engines), servers, default, skipped)


def is_stock(name: str, server: str) -> bool:
    """vLLM's own, plain or speculating, and not one of echo's policies."""
    return name == server and name != ECHO_SERVER


def needs_quiet_start(config: Mapping[str, Any] | None) -> bool:
    """Will a server of this configuration measure the machine when it starts?"""
    if config is None or not is_echo_request(config):
        return False
    options = config.get("echo") or {}
    elastic = options.get("k_max") in (None, AUTO)
    policy = options.get("policy") or default_policy(options)
    return (elastic or policy == "goodput") and not options.get("profile")


def label(name: str, default: str | None = None) -> str:
    """An engine's name in tables and pictures."""
    if name in PLAIN:
        text = ", ".join(["no speculation", *PLAIN[name]])
    elif name.startswith("eagle3-"):
        text = f"vLLM eagle3, K = {name.removeprefix('eagle3-')}"
    elif name == "ngram":
        text = "vLLM ngram"
    else:
        text = {
            "echo-no-transfer": "echo, transfer off",
            "echo-no-width": "echo, width off",
        }.get(name, name)
    return f"{text} (default)" if name == default else text


def prepare_demo() -> tuple[str, dict[str, Any]]:
    """The demo's model, and its echo configuration."""
    command = [sys.executable, "-m", "vllm_echo.cli.main", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"the demo could not be prepared: {done.stderr.strip()}")
    demo = json.loads(done.stdout.splitlines()[-1])
    return demo["model"], read_config(demo["speculative_config"])


def read_config(text: str) -> dict[str, Any]:
    """An echo configuration, inline or as a file's path."""
    inline = text.lstrip().startswith("{")
    try:
        config = json.loads(text if inline else Path(text).expanduser().read_text())
    except OSError as error:
        raise BenchmarkError(f"--speculative-config: {text}: {error.strerror}") from None
    except ValueError as error:
        raise BenchmarkError(f"--speculative-config: no valid JSON: {error}") from None
    if not isinstance(config, dict) or config.get("method") != "echo" or "model" not in config:
        raise BenchmarkError(
            '--speculative-config: needs "method": "echo" and "model", the EAGLE-3 head'
        )
    return config
