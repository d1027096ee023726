# SPDX-License-Identifier: Apache-2.0
"""Life and death of servers, with a Python program in place of `vllm serve`."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.serving import servers, sizing
from benchmarks.serving.errors import BenchmarkError
from benchmarks.serving.fleet import Fleet, free_ports, require_memory
from benchmarks.serving.servers import Server, Serving

SERVES = """
import sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
DIES = "import sys; print('no such model', file=sys.stderr); sys.exit(3)"


@dataclass(frozen=True)
class Program(Serving):
    """Runs ``model`` as a program."""

    def command(self, port, speculative_config, options=()):
        return [sys.executable, "-c", self.model, str(port)]


@pytest.fixture(autouse=True)
def no_preloading(monkeypatch):
    monkeypatch.setattr(servers, "ALLOCATORS", ())
    monkeypatch.setattr(servers, "intel_openmp", lambda _: None)


def program(text: str) -> Program:
    return Program(text, "float32", 64, 4, 2**20)


def free_port(count: int = 1) -> int:
    """The first of ``count`` ports that are free, one after the other."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        with contextlib.suppress(BenchmarkError):
            for port in range(first, first + count):
                servers.require_free_port(port)
            return first


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def start(fleet: Fleet, text: str, folder: Path) -> Server:
    said: list[str] = []
    port = free_port()
    fleet.start({"one": None}, program(text), port, folder, 1, 2**20, said.append)
    assert any("ready" in line for line in said)
    return fleet.servers["one"]


def test_a_server_is_halted_when_ready_and_ended_on_the_way_out(tmp_path):
    with Fleet() as fleet:
        server = start(fleet, SERVES, tmp_path)
        pid = server.process.pid
        assert server.pids == [pid]
        time.sleep(0.1)
        assert state(pid) == "T"
        server.go_on()
        assert server.is_ready()
        server.halt()
    assert not os.path.exists(f"/proc/{pid}")


def test_servers_are_ended_after_an_error(tmp_path):
    with pytest.raises(KeyboardInterrupt), Fleet() as fleet:
        pid = start(fleet, SERVES, tmp_path).process.pid
        raise KeyboardInterrupt
    assert not os.path.exists(f"/proc/{pid}")


def test_a_server_that_dies_shows_the_end_of_its_log(tmp_path):
    with (
        pytest.raises(BenchmarkError, match=r"one ended \(status 3\)(.|\n)*no such model"),
        Fleet() as f,
    ):
        start(f, DIES, tmp_path)


def test_a_port_in_use_is_refused(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BenchmarkError, match="is in use"):
            Server("one", program(SERVES), None, taken.getsockname()[1], tmp_path)


def test_free_ports_avoid_those_in_use(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr("benchmarks.serving.fleet.FIRST_PORT", port - 1)
        monkeypatch.setattr("benchmarks.serving.fleet.LAST_PORT", port + 9)
        assert free_ports(2) > port


def test_too_little_memory_is_refused_before_the_start():
    with pytest.raises(BenchmarkError, match="would need"):
        require_memory("one", 2**60)


def test_the_command(tmp_path):
    command = Serving("m", "bfloat16", 2048, 64, 2**30).command(8100, {"method": "echo"})
    assert command[1:3] == ["serve", "m"]
    assert command[command.index("--max-num-seqs") + 1] == "64"
    assert command[command.index("--speculative-config") + 1] == '{"method": "echo"}'
    assert "--speculative-config" not in Serving("m", "bfloat16", 2048, 64, 2**30).command(1, None)
    assert servers.environment(tmp_path / "s.json")["VLLM_SERVER_DEV_MODE"] == "1"


def test_the_two_settings_of_plain_decoding_are_two_commands(tmp_path):
    """Catches a second baseline that is started as the first one is."""
    seen = {}

    class Kept(Program):
        def command(self, port, speculative_config, options=()):
            seen[port] = Serving.command(self, port, speculative_config, options)
            return super().command(port, speculative_config)

    serving, first = Kept(SERVES, "float32", 64, 4, 2**20), free_port(3)
    configs = {"none": None, "none-sync": None, "eagle3-1": {"method": "eagle3"}}
    with Fleet() as fleet:
        fleet.start(configs, serving, first, tmp_path, 3, 2**20, lambda _: None)
        ports = {name: server.port for name, server in fleet.servers.items()}
    flagged = [name for name, port in ports.items() if "--no-async-scheduling" in seen[port]]
    assert flagged == ["none-sync"]


SETTLES = """
import sys, json
from http.server import BaseHTTPRequestHandler, HTTPServer
left = [64, 3, 0]  # after each step
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        text = f'vllm:num_requests_running{{engine="0"}} {left[0]}.0'
        self.wfile.write(text.encode())
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if len(left) > 1: left.pop(0)
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_not_halted_while_broken_off_requests_run(tmp_path, monkeypatch):
    """Catches a next measurement that begins beside the last one's left-overs. vLLM's count is
    that of its last step, so reading it without a step would wait for ever."""
    with Fleet() as fleet:
        server = start(fleet, SETTLES, tmp_path)
        server.go_on()
        assert server._metrics_page().endswith("64.0")
        server.settle()
        assert server._metrics_page().endswith(" 0.0")
        monkeypatch.setattr(servers, "SETTLE_TIMEOUT", 0)
        with pytest.raises(BenchmarkError, match="one: requests that were broken off still ran"):
            server.settle()


def test_only_vllms_own_speculation_is_mended_and_only_where_something_is_sampled():
    for sampling, config, mended in (
        (True, {"method": "eagle3"}, True),
        (True, {"method": "echo"}, False),
        (True, None, False),
        (False, {"method": "eagle3"}, False),
    ):
        command = Serving("m", "bfloat16", 2048, 64, 2**30, sampling).command(1, config)
        assert ("benchmarks.serving.mended" in command) == mended


def test_memory_of_a_server(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,'
        ' "hidden_size": 64}'
    )
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    model = str(tmp_path)
    assert sizing.kv_bytes_per_token(model, "bfloat16") == 4 * 2 * 8 * 2 * 2
    assert sizing.kv_bytes(model, "bfloat16", 10) == sizing.KV_STEP
    assert sizing.kv_bytes("hub/name", "bfloat16", 10) == sizing.KV_UNKNOWN
    both = sizing.server_bytes(model, {"model": model}, 5)
    assert both == sizing.SERVER_BASE_BYTES + sizing.WEIGHT_COPIES * 2000 + 5


def test_a_halted_server_does_not_outlive_a_benchmark_that_is_killed(tmp_path):
    benchmark = f"""
import time
from pathlib import Path
from benchmarks.serving.fleet import Fleet
from benchmarks.serving.servers import Serving
from tests.benchmarks.test_servers import Program
fleet = Fleet()
program = Program({SERVES!r}, "float32", 64, 4, 2**20)
fleet.start({{"one": None}}, program, {free_port()}, Path({str(tmp_path)!r}), 1, 2**20, print)
print(fleet.servers["one"].process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", benchmark], stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        pid = next(int(line) for line in killed.stdout if line.strip().isdigit())
        time.sleep(0.1)
        assert state(pid) == "T"
        killed.kill()
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and state(pid) != "Z":
        assert time.monotonic() < deadline, "the server lives on"
        time.sleep(0.05)


def test_a_server_that_measures_the_machine_starts_first_and_alone(tmp_path):
    slow = SERVES.replace("class", "time.sleep(1)\nclass")
    configs = {"one": None, "two": None, "echo": {"method": "echo", "echo": {"k_max": "auto"}}}
    said: list[str] = []
    with Fleet() as fleet:
        fleet.start(configs, program(slow), free_port(3), tmp_path, 3, 2**20, said.append)
    assert [line.split()[:2] for line in said[:2]] == [["starting", "echo"], ["echo", "is"]]
    assert [line.split()[0] for line in said[2:4]] == ["starting", "starting"]
