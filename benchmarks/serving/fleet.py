# SPDX-License-Identifier: Apache-2.0
"""Servers together: started, halted when it is not their turn, ended whatever happens."""

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.serving.engines import needs_quiet_start
from benchmarks.serving.errors import BenchmarkError
from benchmarks.serving.servers import Server, Serving, require_free_port

START_TIMEOUT = 900
FIRST_PORT = 8100
LAST_PORT = 9000


class Fleet:
    """All servers of a group. A context manager: they are ended on the way out."""

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exc: object) -> None:
        for server in self.servers.values():
            server.send_signal(signal.SIGTERM)
            server.send_signal(signal.SIGCONT)
        for server in self.servers.values():
            server.stop()

    def start(
        self,
        configs: Mapping[str, Mapping[str, Any] | None],
        serving: Serving,
        port: int,
        folder: Path,
        at_once: int,
        bytes_each: int,
        say: Callable[[str], object],
    ) -> None:
        """Start a server for each of ``configs``, ``at_once`` at a time; halted when ready. One
        that measures the machine starts alone."""
        quiet = {name for name, config in configs.items() if needs_quiet_start(config)}
        waiting = sorted(configs, key=lambda name: name not in quiet)
        starting: dict[str, float] = {}
        while waiting or starting:
            limit = 1 if quiet & {*waiting[:1], *starting} else at_once
            if waiting and len(starting) < limit:
                name = waiting.pop(0)
                require_memory(name, bytes_each)
                number = port + len(self.servers)
                self.servers[name] = Server(name, serving, configs[name], number, folder)
                starting[name] = time.monotonic()
                say(f"starting {name} ({len(self.servers)} of {len(configs)})")
            time.sleep(0.5)
            for name, since in list(starting.items()):
                if self.servers[name].is_ready():
                    self.servers[name].halt()
                    del starting[name]
                    say(f"{name} is ready after {time.monotonic() - since:.0f} s")
                elif time.monotonic() - since > START_TIMEOUT:
                    log = self.servers[name].log
                    raise BenchmarkError(f"{name} was not ready in {START_TIMEOUT} s; see {log}")


def available_memory() -> int:
    """Bytes that new processes could have."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise BenchmarkError("/proc/meminfo does not say how much memory is available")


def require_memory(name: str, wanted: int) -> None:
    available = available_memory()
    if available < wanted:
        raise BenchmarkError(
            f"{name} would need {wanted / 2**30:.1f} GiB and {available / 2**30:.1f} are free; end "
            "other programs, or run fewer servers at a time with --servers"
        )


def free_ports(count: int) -> int:
    """The first of ``count`` free ports in a row."""
    for first in range(FIRST_PORT, LAST_PORT, count):
        with contextlib.suppress(BenchmarkError):
            for port in range(first, first + count):
                require_free_port(port)
            return first
    raise BenchmarkError(f"no {count} ports in a row are free from {FIRST_PORT} on; name --port")
