# SPDX-License-Identifier: Apache-2.0
"""Cost curves that are kept from one start of a server to the next."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.calibration.kit import CURVE
from vllm_echo.integration import profile_store
from vllm_echo.integration.profile_store import load_profile, profile_path, store_profile


def engine_config(**changes: Any) -> Any:
    """As much of vLLM's configuration as is looked at."""

    def model(name: str) -> SimpleNamespace:
        values = {"model": name, "revision": None, "dtype": "bfloat16", "quantization": None}
        return SimpleNamespace(**{**values, "enforce_eager": False, **changes.get(name, {})})

    return SimpleNamespace(
        model_config=model("target"),
        speculative_config=SimpleNamespace(
            draft_model_config=model("draft"), enforce_eager=changes.get("draft_eager", False)
        ),
        parallel_config=SimpleNamespace(world_size=changes.get("world_size", 1)),
        compilation_config=SimpleNamespace(mode=changes.get("mode", 3)),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=changes.get("rows", 2048)),
    )


def test_a_stored_curve_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "curve.json"
    assert load_profile(path) is None
    store_profile(path, CURVE)
    assert load_profile(path) == CURVE
    assert os.listdir(path.parent) == ["curve.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"step": []}', "\udcff"])
def test_a_broken_file_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    """A server measures again rather than fail. Catches files of an earlier version, too."""
    path = tmp_path / "curve.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert load_profile(path) is None


def test_a_place_that_cannot_be_used_is_no_reason_not_to_serve(tmp_path: Path) -> None:
    """A home that is read-only, or is none."""
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "curve.json"
    assert load_profile(path) is None
    store_profile(path, CURVE)
    (tmp_path / "folder").mkdir()
    assert load_profile(tmp_path / "folder") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"target": {"model": "other"}},
        {"target": {"dtype": "float32"}},
        {"target": {"quantization": "awq"}},
        {"target": {"enforce_eager": True}},
        {"draft": {"model": "other"}},
        {"draft": {"revision": "1"}},
        {"draft_eager": True},
        {"mode": 0},
        {"rows": 256},
        {"world_size": 2},
    ],
)
def test_another_pair_or_way_of_running_it_has_a_curve_of_its_own(changes: dict[str, Any]) -> None:
    assert profile_path(engine_config()) == profile_path(engine_config())
    assert profile_path(engine_config(**changes)) != profile_path(engine_config())


def test_another_machine_has_a_curve_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home directory can be that of many machines."""
    before = profile_path(engine_config())
    monkeypatch.setattr(profile_store, "_processor", lambda: "another")
    assert profile_path(engine_config()) != before
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert profile_path(engine_config()) != before


def test_what_is_preloaded_has_a_curve_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Intel's OpenMP or an allocator steps take tens of per cent longer. Where a library
    lies, and which comes first, changes nothing."""
    paths = set()
    for value in ("", "/a/libiomp5.so", "/a/libiomp5.so:/b/libtcmalloc.so.4"):
        monkeypatch.setenv("LD_PRELOAD", value)
        paths.add(profile_path(engine_config()))
    assert len(paths) == 3
    monkeypatch.setenv("LD_PRELOAD", "/c/libtcmalloc.so.4 /d/libiomp5.so")
    assert profile_path(engine_config()) in paths


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json"])
def test_a_head_trained_again_in_its_place_has_a_curve_of_its_own(
    tmp_path: Path, name: str
) -> None:
    """Catches a key of names only: the curve of the old head would be kept for the new one."""
    (tmp_path / name).write_text("old")
    changes = {"draft": {"model": str(tmp_path)}}
    before = profile_path(engine_config(**changes))
    assert profile_path(engine_config(**changes)) == before
    (tmp_path / name).write_text("new weights")
    assert profile_path(engine_config(**changes)) != before


def test_files_of_a_hub_are_those_that_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a branch that has moved on under one name."""
    config = tmp_path / "config.json"
    found = {"target": None, "draft": str(config)}
    monkeypatch.setattr(profile_store, "try_to_load_from_cache", lambda name, *_, **__: found[name])
    paths = []
    for size in (1, 2):
        config.write_text(size * " ")
        paths.append(profile_path(engine_config()))
    assert paths[0] != paths[1]
