# SPDX-License-Identifier: Apache-2.0
"""Cost curves that are kept from one start of a server to the next."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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
        speculative_config=SimpleNamespace(draft_model_config=model("draft")),
        parallel_config=SimpleNamespace(world_size=changes.get("world_size", 1)),
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
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    assert profile_path(engine_config()) != before
