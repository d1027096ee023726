# SPDX-License-Identifier: Apache-2.0
"""How `calibrate` and `profile` drive an engine: its environment, its processes, its calls; vLLM is
not there."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.calibration.kit import draft_trace, platt
from vllm_echo.integration.offline import OfflineEngine

Hook = Callable[[], None]
SET_BY_US = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class Tokenizer:
    """A character is a token; a chat begins with 1 and ends with 2."""

    def __init__(self, chat_template: str | None = None):
        self.chat_template = chat_template

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool, return_dict: bool
    ) -> list[int]:
        assert add_generation_prompt
        assert not return_dict
        assert [message["role"] for message in messages] == ["user"]
        return [1, *self.encode(messages[0]["content"]), 2]


class FakeLLM:
    """vLLM's LLM, as far as it is used; ``calls`` in their order."""

    while_it_starts: Hook = staticmethod(lambda: None)
    fails_at: str | None = None
    calls: list[tuple[Any, ...]] = []
    environment: dict[str, str] = {}
    tokenizer = Tokenizer()

    def __init__(self, **arguments: Any):
        FakeLLM.environment = dict(os.environ)
        FakeLLM.while_it_starts()
        self.arguments = arguments
        core = SimpleNamespace(shutdown=lambda timeout: self._called("shutdown"))
        self.llm_engine = SimpleNamespace(engine_core=core)

    def get_tokenizer(self) -> Tokenizer:
        return FakeLLM.tokenizer

    def _called(self, *call: Any) -> None:
        FakeLLM.calls.append(call)
        if call[0] == FakeLLM.fails_at:
            raise KeyboardInterrupt

    def sleep(self, level: int, mode: str) -> None:
        self._called("sleep", level, mode)

    def wake_up(self, tags: list[str]) -> None:
        self._called("wake_up", *tags)

    def enqueue(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> None:
        self._called("enqueue", prompts, params)

    def wait_for_completion(self, use_tqdm: bool) -> None:
        self._called("wait")

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self._called(method, *args)
        if method == "take_echo_recording":
            return [draft_trace(platt((0.0, 1.0)), 1, 3).to_bytes()]
        if method == "take_echo_step_log":
            return [[{"period": 1.0}]]
        return [None]


@pytest.fixture(autouse=True)
def _stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    vllm = ModuleType("vllm")
    vllm.LLM = FakeLLM  # type: ignore[attr-defined]
    vllm.SamplingParams = lambda **values: SimpleNamespace(**values)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(FakeLLM, "calls", [])
    for name in (*SET_BY_US, "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]  # set by the engine, where monkeypatch knows nothing of it


def engine() -> OfflineEngine:
    return OfflineEngine("target", "head", {"policy": "static"}, 5, {"max_num_seqs": 3})


def names() -> list[str]:
    return [call[0] for call in FakeLLM.calls]


def test_the_environment_is_one_that_an_engine_starts_in() -> None:
    """Catches a KV cache as large as the machine: vLLM asks for most of its memory, and fails."""
    engine()
    assert {name: FakeLLM.environment[name] for name in SET_BY_US} == SET_BY_US


def test_what_the_caller_says_of_the_environment_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty value says nothing."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "")
    engine()
    assert FakeLLM.environment["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert FakeLLM.environment["VLLM_LOGGING_LEVEL"] == "WARNING"


@pytest.fixture
def openmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.write_text("")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return str(library)


def test_the_engines_processes_load_openmp(openmp: str) -> None:
    """And nobody after them."""
    engine()
    assert FakeLLM.environment["LD_PRELOAD"] == openmp
    assert "LD_PRELOAD" not in os.environ


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/usr/lib/libtcmalloc.so.4", "/usr/lib/libtcmalloc.so.4:{}"),
        ("/opt/libiomp5.so", "/opt/libiomp5.so"),
        ("/usr/lib/libgomp.so.1", "/usr/lib/libgomp.so.1"),
        ("/a.so:/opt/libiomp5.so:/b.so", "/a.so:/opt/libiomp5.so:/b.so"),
    ],
)
def test_what_is_preloaded_already_stays(
    openmp: str, monkeypatch: pytest.MonkeyPatch, given: str, expected: str
) -> None:
    """Catches a second OpenMP beside the caller's own."""
    monkeypatch.setenv("LD_PRELOAD", given)
    engine()
    assert FakeLLM.environment["LD_PRELOAD"] == expected.format(openmp)
    assert os.environ["LD_PRELOAD"] == given


def test_without_openmp_nothing_is_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that is not there would be complained about by every process."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    engine()
    assert "LD_PRELOAD" not in FakeLLM.environment


def test_a_failed_start_leaves_no_traces(openmp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        os.environ["LD_PRELOAD"] += ":more"  # as vLLM does
        raise RuntimeError("no")

    monkeypatch.setattr(FakeLLM, "while_it_starts", staticmethod(fail))
    handler, spawn = signal.getsignal(signal.SIGINT), util.spawnv_passfds
    with pytest.raises(RuntimeError, match="no"):
        engine()
    assert "LD_PRELOAD" not in os.environ
    assert signal.getsignal(signal.SIGINT) is handler
    assert util.spawnv_passfds is spawn


def test_an_interruption_while_vllm_starts_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM swallows a KeyboardInterrupt there. Catches Ctrl-C that is pressed in vain."""
    reached = []

    def start() -> None:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        reached.append("vLLM would go on")

    monkeypatch.setattr(FakeLLM, "while_it_starts", staticmethod(start))
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        engine()
    assert reached == []
    assert signal.getsignal(signal.SIGINT) is handler


def blocks_interrupts(pid: int | str) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk"))
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)


def test_the_engines_processes_do_not_hear_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends it to all of them. Catches engines that die in the middle of a step, with a
    traceback each, before they are told to end."""
    pids = []

    def start() -> None:
        pids.append(util.spawnv_passfds(b"/bin/sleep", [b"sleep", b"60"], []))
        assert not blocks_interrupts("thread-self")

    monkeypatch.setattr(FakeLLM, "while_it_starts", staticmethod(start))
    engine()
    later = subprocess.Popen(["/bin/sleep", "60"])
    try:
        assert blocks_interrupts(pids[0])
        assert not blocks_interrupts(later.pid)
    finally:
        for pid in (pids[0], later.pid):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_the_engine_is_that_which_would_be_served() -> None:
    arguments = engine()._llm.arguments  # type: ignore[attr-defined]
    assert arguments == {
        "model": "target",
        "speculative_config": {
            "method": "echo",
            "model": "head",
            "num_speculative_tokens": 5,
            "echo": {"policy": "static"},
        },
        "enable_prefix_caching": False,
        "max_num_seqs": 3,
    }


def test_all_requests_are_there_before_the_first_step() -> None:
    """Else which of them share a step, and with it the last bits of their logits, is up to the
    timing of two processes: two runs would not give the same bytes."""
    trace = engine().record([[1, 2], [3]], 1.0, 7, seed=40)
    assert trace.num_roots == 3
    assert names() == [
        "start_echo_recording",
        "sleep",
        "enqueue",
        "wake_up",
        "wait",
        "take_echo_recording",
        "stop_echo_recording",
    ]
    assert FakeLLM.calls[1] == ("sleep", 0, "keep")
    assert FakeLLM.calls[3] == ("wake_up", "scheduling")
    _, prompts, params = FakeLLM.calls[2]
    assert prompts == [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]
    assert [p.seed for p in params] == [40, 41]
    assert {(p.temperature, p.max_tokens, p.ignore_eos) for p in params} == {(1.0, 7, False)}


def test_greedy_requests_have_no_seed() -> None:
    """vLLM builds a generator for each seed."""
    engine().record([[1]], 0.0, 7, seed=40)
    assert FakeLLM.calls[2][2][0].seed is None


def test_a_step_log_is_taken_under_its_own_options() -> None:
    log = engine().step_log([[1]], {"k_max": 9}, 7)
    assert log == [{"period": 1.0}]
    options = {"num_speculative_tokens": 5, "policy": "static", "k_max": 9}
    assert FakeLLM.calls[0] == ("set_echo_options", options)
    assert names()[1] == "start_echo_step_log"
    assert names()[-1] == "take_echo_step_log"
    assert FakeLLM.calls[3][2][0].ignore_eos, "every run has as many steps as it was asked for"


@pytest.mark.parametrize("call", ["sleep", "enqueue", "wake_up", "wait", "take_echo_recording"])
def test_an_interrupted_engine_is_asked_nothing_more(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It may be gone, and would never answer. Catches Ctrl-C that has to be pressed twice."""
    offline = engine()
    monkeypatch.setattr(FakeLLM, "fails_at", call)
    with pytest.raises(KeyboardInterrupt):
        offline.record([[1]], 0.0, 7, seed=0)
    assert names()[-1] == call
    offline.close()
    assert names()[-2:] == [call, "shutdown"]


@pytest.mark.parametrize("template", [None, "{{ messages }}"])
def test_questions_are_asked_in_the_models_chat_format(
    monkeypatch: pytest.MonkeyPatch, template: str | None
) -> None:
    """As plain text where it has none; the middle of a long one is left out, never its ends."""
    monkeypatch.setattr(FakeLLM, "tokenizer", Tokenizer(template))
    offline = engine()
    text = [ord(letter) for letter in "abcdefgh"]
    whole = [1, *text, 2] if template else text
    assert offline.chat_tokens("abcdefgh", 20) == whole
    assert offline.chat_tokens("abcdefgh", len(whole)) == whole
    for room in range(1, len(whole)):
        cut = offline.chat_tokens("abcdefgh", room)
        assert len(cut) == room
        assert cut[-1] == whole[-1]
        assert cut == whole[: room // 2] + whole[len(whole) - (room - room // 2) :]
