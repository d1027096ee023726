# SPDX-License-Identifier: Apache-2.0
"""Where things are kept between runs."""

import tempfile
from pathlib import Path

import pytest

from vllm_echo.cache import cache_dir


def test_the_nearest_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("VLLM_ECHO_CACHE", raising=False)
    assert cache_dir() == Path("/home/somebody/.cache/vllm-echo")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_dir() == Path("/caches/vllm-echo")
    monkeypatch.setenv("VLLM_ECHO_CACHE", "/ours")
    assert cache_dir() == Path("/ours")


def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container under any user id: a server must not end for want of a folder."""

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("VLLM_ECHO_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert cache_dir() == Path(tempfile.gettempdir(), ".cache", "vllm-echo")
