# SPDX-License-Identifier: Apache-2.0
"""The set itself: registry, manifest and series agree, and every patch stays a doorway."""

import ast
import re
from pathlib import Path

import pytest

from tests.integration.patching.conftest import contents
from vllm_echo.errors import EchoPatchError
from vllm_echo.integration import doors
from vllm_echo.integration.patch_set import PATCHES_DIR, PatchSet, load_patch_set, sha256
from vllm_echo.integration.patching import Installation, apply_patches

MAX_ADDED_LINES_OF_A_HUNK = 10


def test_the_readme_lists_exactly_the_series_and_its_files(patch_set: PatchSet) -> None:
    rows = re.findall(r"^\| (?:`([^`]+\.patch)`)? ?\| `([^`]+\.py)`", _readme(), flags=re.M)
    assert [name for name, _ in rows if name] == [Path(name).name for name in patch_set.names]
    assert [path for _, path in rows] == [diff.path for diff in patch_set.diffs]


def test_every_patch_file_is_in_the_series(patch_set: PatchSet) -> None:
    found = {str(path.relative_to(PATCHES_DIR)) for path in PATCHES_DIR.rglob("*.patch")}
    assert found == set(patch_set.names)


def test_the_manifest_holds_for_the_published_files(
    vllm: Installation, patch_set: PatchSet
) -> None:
    before = contents(vllm)
    assert {path: sha256(before[path]) for path in patch_set.before} == patch_set.before
    apply_patches(vllm, patch_set, if_needed=False)
    after = contents(vllm)
    assert {path: sha256(after[path]) for path in patch_set.after} == patch_set.after


def test_every_hunk_is_a_doorway(patch_set: PatchSet) -> None:
    for diff in patch_set.diffs:
        for hunk in diff.hunks:
            added = len(hunk.new) - len(set(hunk.old) & set(hunk.new))
            assert added <= MAX_ADDED_LINES_OF_A_HUNK, (diff.path, hunk.new_line)


def test_the_patches_know_only_the_doors(vllm: Installation, patch_set: PatchSet) -> None:
    apply_patches(vllm, patch_set, if_needed=False)
    imported = set()
    for path in patch_set.after:
        for node in ast.walk(ast.parse((vllm.root / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm_echo"):
                assert node.module == "vllm_echo.integration.doors", path
                imported |= {alias.name for alias in node.names}
    assert imported == set(doors.__all__), (
        "a door that nobody goes through, or one that is not there"
    )


@pytest.mark.parametrize("ruin", ["series", "manifest.json"])
def test_an_inconsistent_folder_is_refused(tmp_path: Path, ruin: str) -> None:
    for name in ("series", "manifest.json"):
        (tmp_path / name).write_text((PATCHES_DIR / name).read_text())
    (tmp_path / "vllm-0.32.0").symlink_to(PATCHES_DIR / "vllm-0.32.0")
    assert load_patch_set(tmp_path).names
    if ruin == "series":
        (tmp_path / "series").write_text("vllm-0.32.0/99-nobody-wrote-it.patch\n")
    else:
        (tmp_path / "manifest.json").write_text('{"files": {}}')
    with pytest.raises(EchoPatchError, match=r"99-nobody|manifest\.json does not list"):
        load_patch_set(tmp_path)


def _readme() -> str:
    return (PATCHES_DIR / "README.md").read_text(encoding="utf-8")
