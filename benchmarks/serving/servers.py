# SPDX-License-Identifier: Apache-2.0
"""One `vllm serve`: its command, its environment, its life.

A server whose turn it is not is halted (SIGSTOP): idle vLLM still polls its queues, about one per
cent of a core each. Servers have process groups of their own in the benchmark's session: Ctrl-C
reaches the benchmark only, which ends them in order, and if it is killed outright the kernel wakes
and hangs up the halted ones.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving import counters
from benchmarks.serving.engines import PLAIN, needs_quiet_start
from benchmarks.serving.errors import BenchmarkError
from vllm_echo.core.config_file import is_echo_request
from vllm_echo.core.timing import STAGE_TIMES_ENV
from vllm_echo.integration.offline import intel_openmp

ROOT = str(Path(__file__).resolve().parents[2])
HOST = "127.0.0.1"
MODEL_NAME = "benchmark"
STOP_TIMEOUT = 20
SETTLE_TIMEOUT = 30
LOG_LINES = 8
CAUSE = re.compile(r"\b\w*(Error|Exception): |\berror: ")
PR_SET_PDEATHSIG = 1
ALLOCATORS = (
    Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"),
    Path("/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4"),
)


@dataclass(frozen=True)
class Serving:
    """What all servers of a run have in common."""

    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_bytes: int
    sampling: bool = False
    """Some requests have a temperature above 0."""

    def command(
        self,
        port: int,
        speculative_config: Mapping[str, Any] | None,
        options: Sequence[str] = (),
    ) -> list[str]:
        stock = speculative_config is not None and not is_echo_request(speculative_config)
        if stock and self.sampling:
            command = [sys.executable, "-m", "benchmarks.serving.mended"]
        else:
            command = [str(Path(sys.executable).with_name("vllm"))]
        command += ["serve", self.model]
        command += ["--host", HOST, "--port", str(port), "--served-model-name", MODEL_NAME]
        command += ["--dtype", self.dtype, "--max-model-len", str(self.max_model_len)]
        command += ["--max-num-seqs", str(self.max_num_seqs)]
        command += ["--kv-cache-memory-bytes", str(self.kv_bytes)]
        # The same prompts come again and again: only the first engine would compute them.
        command += ["--no-enable-prefix-caching"]
        # vLLM 0.32 on a CPU dies of a seeded request whose prompt is split over steps.
        command += ["--no-enable-chunked-prefill", "--disable-uvicorn-access-log"]
        if speculative_config is not None:
            command += ["--speculative-config", json.dumps(speculative_config)]
        return [*command, *options]


def environment(stages: Path) -> dict[str, str]:
    """A server's: that of `make serve`, with the development endpoints."""
    values = dict(os.environ)
    given = values.get("LD_PRELOAD", "")
    wanted = [intel_openmp(given), *(path for path in ALLOCATORS if path.is_file())]
    libraries = [str(path.resolve()) for path in wanted if path is not None]
    values["LD_PRELOAD"] = ":".join(filter(None, [given, *libraries]))
    values.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the command's
    values.pop("VLLM_API_KEY", None)
    values["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, values.get("PYTHONPATH")]))
    values["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    values["VLLM_SERVER_DEV_MODE"] = "1"
    values[STAGE_TIMES_ENV] = str(stages)
    values.setdefault("VLLM_NO_USAGE_STATS", "1")
    return values


class Server:
    """One `vllm serve`."""

    def __init__(
        self,
        name: str,
        serving: Serving,
        speculative_config: Mapping[str, Any] | None,
        port: int,
        folder: Path,
    ):
        self.name = name
        self.port = port
        self.url = f"http://{HOST}:{port}"
        self.log = folder / f"server-{name}.log"
        self.stages = folder / f"stages-{name}.json"
        self.options: dict[str, Any] | None = None
        self._given_options: dict[str, Any] | None = None
        self._halted = False
        require_free_port(port)
        self.stages.unlink(missing_ok=True)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                serving.command(port, speculative_config, PLAIN.get(name, ())),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(self.stages),
                process_group=0,
                preexec_fn=_end_with_parent,
            )

    def is_ready(self) -> bool:
        self.require_alive()
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except OSError:
            return False

    def require_alive(self) -> None:
        if self.process.poll() is not None:
            raise BenchmarkError(
                f"the server {self.name} ended (status {self.process.returncode}); from "
                f"{self.log}:\n{telling_lines(self.log)}"
            )

    @property
    def pids(self) -> list[int]:
        return counters.members(self.process.pid)

    def halt(self) -> None:
        self.send_signal(signal.SIGSTOP)
        self._halted = True

    def go_on(self) -> None:
        self.require_alive()
        self.send_signal(signal.SIGCONT)
        self._halted = False

    def metrics(self) -> dict[str, float]:
        return counters.parse_metrics(self._metrics_page())

    def _metrics_page(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            return response.read().decode()

    def settle(self) -> None:
        """Wait until requests that were broken off are gone. vLLM counts what runs when it makes a
        step, so one more token is asked for until nothing else is there."""
        body = {"model": MODEL_NAME, "prompt": "a", "max_tokens": 1}
        deadline = time.monotonic() + SETTLE_TIMEOUT
        while time.monotonic() < deadline:
            self._post("/v1/completions", body)
            if not counters.unfinished_requests(self._metrics_page()):
                return
            time.sleep(0.05)
        raise BenchmarkError(
            f"{self.name}: requests that were broken off still ran {SETTLE_TIMEOUT} s later; see "
            f"{self.log}"
        )

    def schedules_ahead(self) -> bool:
        """Is asynchronous scheduling on, whatever was asked for?"""
        url = f"{self.url}/server_info?config_format=json"
        with urllib.request.urlopen(url, timeout=60) as response:
            return bool(json.load(response)["vllm_config"]["scheduler_config"]["async_scheduling"])

    def given_options(self) -> Mapping[str, Any]:
        """Echo's options as this server has settled them at its start, cost curve included."""
        if self._given_options is None:
            self._given_options = self._set_options({})
        return self._given_options

    def switch(self, changes: Mapping[str, Any]) -> None:
        """Serve with the options of the start, but for ``changes``."""
        wanted = {**self.given_options(), **changes}
        if wanted != self.options:
            self.options = self._set_options(wanted)
        if needs_quiet_start({"echo": self.options}):
            raise BenchmarkError(f"{self.name}: {self.options['policy']} has no profile to go by")

    def _set_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        body = {"method": "set_echo_options", "args": [options]}
        return self._post("/collective_rpc", body)["results"][0]

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace").strip()
            raise BenchmarkError(f"{self.name}: {path}: {text[:500]}") from None

    def stop(self) -> None:
        """End it and everything that it started."""
        self.send_signal(signal.SIGTERM)
        self.send_signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT)
        self.send_signal(signal.SIGKILL)
        self.process.wait()

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def _end_with_parent() -> None:
    """Runs in the new process: SIGTERM for it when the benchmark dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def require_free_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            raise BenchmarkError(f"port {port} is in use; choose others with --port") from None


def telling_lines(path: Path) -> str:
    """The errors of a log (vLLM's last is seldom the cause), and its last lines."""
    lines = [line[:300] for line in path.read_text(errors="replace").splitlines()]
    early = [line for line in lines[:-LOG_LINES] if " WARNING " not in line]
    causes = [line for line in early if CAUSE.search(line)]
    return "\n".join(dict.fromkeys(causes[:LOG_LINES] + lines[-LOG_LINES:]))
