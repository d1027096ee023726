# SPDX-License-Identifier: Apache-2.0
"""Weights in every kind of file: those that vLLM would read are those that are judged."""

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.heads import kit
from vllm_echo.integration.heads.files import read_tensors

pytestmark = pytest.mark.timeout(300)


def as_old_bin(folder: Path) -> Path:
    return kit.as_bin(folder, _use_new_zipfile_serialization=False)


KINDS: dict[str, Callable[[Path], Path]] = {
    "bin": kit.as_bin,
    "old bin": as_old_bin,
    "pt": lambda folder: kit.as_bin(folder, "head.pt"),
    "shards": kit.as_shards,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_is_judged(target: Path, copy: Path, kind: str) -> None:
    """A .bin without d2t was not looked at: it started, and nothing was accepted."""
    kit.change_tensors(copy, kit.drop("d2t"))
    assert "has no map d2t" in kit.refused(target, KINDS[kind](copy))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_is_taken(target: Path, copy: Path, kind: str) -> None:
    assert kit.accepted(target, KINDS[kind](copy)).speculative_config is not None


def test_a_trainers_files_are_not_weights(target: Path, copy: Path) -> None:
    """Beside a .bin they are left out; beside a .pt vLLM looks no further than them."""
    (copy / "training_args.bin").write_bytes(b"not weights, and not looked at")
    assert kit.accepted(target, kit.as_bin(copy)).speculative_config is not None
    (copy / "pytorch_model.bin").rename(copy / "head.pt")
    assert "no weights that vLLM would take" in kit.refused(target, copy)


def test_safetensors_go_before_bin(target: Path, copy: Path) -> None:
    torch.save({"nonsense": torch.zeros(1)}, copy / "pytorch_model.bin")
    assert kit.accepted(target, copy).speculative_config is not None


def test_a_head_without_weights(target: Path, copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "no weights" in kit.refused(target, copy)
    (copy / "optimizer.bin").write_bytes(b"")
    assert "no weights" in kit.refused(target, copy)


def test_a_broken_safetensors_file(target: Path, copy: Path) -> None:
    path = copy / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(b"\x10\0\0\0\0\0\0\0not json, alas")
    assert "broken file model.safetensors" in kit.refused(target, copy)
    path.write_bytes(content[: len(content) // 2])
    assert "broken file model.safetensors" in kit.refused(target, copy)


class Trainer:
    """What has no place in a file of weights."""


def nested(path: Path) -> None:
    torch.save({"state_dict": {"fc.weight": torch.zeros(1)}, "epoch": 3}, path)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda path: path.write_bytes(b"garbage"), "broken file pytorch_model.bin"),
        (lambda path: torch.save({"trainer": Trainer()}, path), "broken file pytorch_model.bin"),
        (lambda path: torch.save([torch.zeros(1)], path), "holds a list, not tensors by name"),
        (nested, "whose entry 'state_dict' is a dict, no tensor"),
    ],
    ids=["garbage", "objects", "list", "nested"],
)
def test_a_bin_that_is_no_state_dict(
    target: Path, copy: Path, write: Callable[[Path], object], expected: str
) -> None:
    (copy / "model.safetensors").unlink()
    write(copy / "pytorch_model.bin")
    assert expected in kit.refused(target, copy)


def test_a_shard_that_is_not_there(target: Path, copy: Path) -> None:
    (kit.as_shards(copy) / "model-00002-of-00002.safetensors").unlink()
    message = kit.refused(target, copy)
    assert "lacks the file model-00002-of-00002.safetensors" in message


def test_a_broken_index(target: Path, copy: Path) -> None:
    (kit.as_shards(copy) / "model.safetensors.index.json").write_text(json.dumps({"weights": 1}))
    assert "has a broken model.safetensors.index.json" in kit.refused(target, copy)


def test_a_tensor_in_two_files(target: Path, copy: Path) -> None:
    """Without an index vLLM reads every file, and the last one wins."""
    norm = {"norm.weight": load_file(copy / "model.safetensors")["norm.weight"]}
    save_file(norm, copy / "older.safetensors")
    expected = "has norm.weight twice, in model.safetensors and in older.safetensors"
    assert expected in kit.refused(target, copy)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.parametrize("name", ["large.bin", "large.safetensors"])
def test_a_large_file_is_mapped_and_not_read(tmp_path: Path, name: str) -> None:
    size = 1 << 26
    tensors = {"large": torch.zeros(size, dtype=torch.bfloat16)}
    save = torch.save if name.endswith(".bin") else save_file
    save(tensors, tmp_path / name)
    before = resident_bytes()
    tensor = read_tensors("model: the head", tmp_path)["large"]
    assert tensor.shape == (size,)
    assert resident_bytes() - before < 2 * size / 8
