# SPDX-License-Identifier: Apache-2.0
"""`vllm-echo calibrate` and `vllm-echo profile` as a person runs them, with the tiny pair: the
engine in processes of its own, Ctrl-C, and what is on the disk afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.calibration.kit import CURVE
from tests.serving import tiny
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import StepLoad
from vllm_echo.core.policies import make_policy
from vllm_echo.core.trace import DraftTrace

pytestmark = pytest.mark.timeout(1500)  # starts of an engine, on a machine that does other things

START_SECONDS = 600
NUM_PROMPTS = 12
OPTIONS = ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The tiny pair, with a tokenizer: a byte is a token. The target says nothing that the head
    could draft, so that no chance hit makes a difference."""
    folder = tmp_path_factory.mktemp("pair")
    target, head = tiny.make_target(folder / "target"), tiny.make_head(folder / "head")
    drafted = load_file(head / "model.safetensors")["d2t"] + torch.arange(tiny.DRAFT_VOCAB)
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight"][drafted] = 0.0
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[byte] = len(vocabulary)
    while len(vocabulary) < tiny.VOCAB:
        vocabulary[f"<{len(vocabulary)}>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(target / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(NUM_PROMPTS)))
    return {
        "--model": str(target),
        "--draft": str(head),
        "--prompts": str(prompts),
    }


def start(log: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    """The command in a session of its own, as a terminal has it. What it says goes to ``log``."""
    # Other tests run engines in their own process, with settings for that.
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, "-m", "vllm_echo.cli.main", *arguments, *OPTIONS]
    with log.open("wb") as file:
        return subprocess.Popen(
            command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def finish(process: "subprocess.Popen[bytes]", log: Path) -> str:
    try:
        status = process.wait(START_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    said = log.read_text(errors="replace")
    assert status == 0, said[-4000:]
    assert "Traceback" not in said
    return said


def calibrate(pair: dict[str, str], output: Path) -> list[str]:
    named = [word for option in pair.items() for word in option]
    sizes = ["--batch", "4", "--output-tokens", "24", "--max-depth", "3", "--target-depth", "2"]
    return ["calibrate", *named, "--output", str(output), *sizes, "--keep-work"]


@pytest.fixture(scope="module")
def calibrated(pair: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(echo.json, what was said) of a run without interruption."""
    folder = tmp_path_factory.mktemp("calibrated")
    output = folder / "echo.json"
    said = finish(start(folder / "log", *calibrate(pair, output)), folder / "log")
    return output, said


def test_a_head_that_is_never_right_is_found_out(calibrated: tuple[Path, str]) -> None:
    """The result drafts nothing, and says so."""
    output, said = calibrated
    assert "the head was never right: the root gate lets nothing pass" in said
    assert 'nothing will be drafted ("k_max" is "auto")' in said
    assert f"wrote {output}" in said
    config = EchoConfig.from_speculative_config(json.loads(output.read_text()))
    policy = make_policy(replace(config, profile=CURVE))
    assert [policy.offer(StepLoad(n)).num_nodes for n in (1, 4, 64)] == [0, 0, 0]
    report = output.with_suffix(".calibration.md").read_text()
    assert report in said
    for depth in (1, 2, 3):
        assert f"\n| {depth} | 0 | " in report
    assert output.with_suffix(".calibration.png").stat().st_size > 5000


def test_every_output_position_is_a_root(calibrated: tuple[Path, str]) -> None:
    """Catches steps that verify, after which positions are missing, and narrowed layers."""
    pieces = sorted(calibrated[0].with_suffix(".calibration").glob("*.npz"))
    assert len(pieces) == 2 * NUM_PROMPTS / 4
    for piece in pieces:
        trace = DraftTrace.load(piece)
        assert trace.num_requests == 4
        assert trace.depths.tolist() == [1] * 3 + [2] * 9 + [3] * 9
        for request in range(4):
            positions = trace.positions[trace.requests == request].tolist()
            assert positions == list(range(1, len(positions) + 1))


def test_an_interrupted_calibration_goes_on_to_the_same_bytes(
    pair: dict[str, str], calibrated: tuple[Path, str], tmp_path: Path
) -> None:
    """Ctrl-C reaches every process of the terminal. Catches one that has to be pressed twice, what
    it takes with it, and pieces that depend on who shares a step by chance."""
    output, log = tmp_path / "echo.json", tmp_path / "log"
    work = output.with_suffix(".calibration")
    process = start(log, *calibrate(pair, output))
    deadline = time.monotonic() + START_SECONDS
    while not list(work.glob("*.npz")) and time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    try:
        status = process.wait(120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    said = log.read_text(errors="replace")
    assert status == 130, said[-4000:]
    assert "interrupted; run the same command again to go on" in said
    assert "Traceback" not in said
    assert not output.exists()
    collected = {piece.name: piece.read_bytes() for piece in work.glob("*.npz")}
    assert 1 <= len(collected) < 6

    finish(start(log, *calibrate(pair, output)), log)
    for name, content in collected.items():
        assert (work / name).read_bytes() == content
    whole = calibrated[0]
    for piece in whole.with_suffix(".calibration").glob("*.npz"):
        assert (work / piece.name).read_bytes() == piece.read_bytes(), piece.name
    for suffix in (".json", ".calibration.md", ".calibration.png"):
        assert output.with_suffix(suffix).read_bytes() == whole.with_suffix(suffix).read_bytes()


def test_a_profile_of_the_tiny_pair(
    pair: dict[str, str], calibrated: tuple[Path, str], tmp_path: Path
) -> None:
    """Times mean nothing here, but they are times, and go beside the calibration."""
    output, log = tmp_path / "echo.json", tmp_path / "log"
    output.write_bytes(calibrated[0].read_bytes())
    command = ["profile", "--model", pair["--model"], "--output", str(output)]
    said = finish(start(log, *command, "--max-requests", "2"), log)
    assert "Knee of the paper's hinge: " in said
    before, after = (json.loads(path.read_text()) for path in (calibrated[0], output))
    config = EchoConfig.from_speculative_config(after)
    assert config.k_max == "auto"
    assert config.profile is not None
    assert [rows for rows, _ in config.profile.step][:2] == [1, 2]
    assert all(ms > 0 for _, ms in config.profile.step)
    assert config.profile.roots(1) > 0
    assert after["echo"].pop("profile")
    assert after["echo"].pop("k_max") == "auto"
    assert after == before
    assert output.with_suffix(".profile.png").stat().st_size > 5000
