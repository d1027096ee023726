# SPDX-License-Identifier: Apache-2.0
"""The patch set in `patches/`: series, patches and manifest, read and checked for consistency."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from vllm_echo.errors import EchoPatchError
from vllm_echo.integration.unified_diff import FileDiff, parse_diff

PATCHES_DIR = Path(__file__).resolve().parents[2] / "patches"


@dataclass(frozen=True)
class PatchSet:
    """What `patches/` holds: patch names in order, and the two hashes of every touched file."""

    names: tuple[str, ...]
    diffs: tuple[FileDiff, ...]
    before: dict[str, str]
    after: dict[str, str]


def load_patch_set(folder: Path = PATCHES_DIR) -> PatchSet:
    """Read series, patches and manifest."""
    try:
        series = (folder / "series").read_text(encoding="utf-8").splitlines()
        names = [line for line in map(str.strip, series) if line and not line.startswith("#")]
        texts = [(folder / name).read_text(encoding="utf-8") for name in names]
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EchoPatchError(
            f"the patch set in {folder} cannot be read ({error}); install vllm-echo with "
            "`pip install -e .` from a checkout of the project"
        ) from None
    diffs = [
        diff for name, text in zip(names, texts, strict=True) for diff in parse_diff(text, name)
    ]
    hashes: dict[str, dict[str, str]] = manifest["files"]
    if {diff.path for diff in diffs} != set(hashes):
        raise EchoPatchError(
            f"{folder}/manifest.json does not list exactly the files that the series touches; run "
            "scripts/update_manifest.py"
        )
    before = {path: entry["before"] for path, entry in hashes.items()}
    after = {path: entry["after"] for path, entry in hashes.items()}
    return PatchSet(tuple(names), tuple(diffs), before, after)


def checked(path: str, content: bytes, expected: str) -> bytes:
    """The content itself, when its hash is the one that the manifest promises."""
    if sha256(content) != expected:
        raise EchoPatchError(
            f"{path} would not become what patches/manifest.json promises; nothing was changed. "
            "The patch set is damaged: check the project out again"
        )
    return content


def sha256(content: bytes) -> str:
    """The hash in the manifest's spelling."""
    return hashlib.sha256(content).hexdigest()
