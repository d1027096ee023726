# SPDX-License-Identifier: Apache-2.0
"""Results as they come: one line of JSON each, so that an interrupted run can go on.

The first line has the settings; every start of a run adds a line of provenance."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.serving.errors import BenchmarkError

FORMAT = 2
"""Of what is measured. 1 let the load fall at a measurement's end, and knew one plain decoding."""


class Journal:
    """``results.jsonl`` in a folder that git ignores."""

    def __init__(self, folder: Path):
        self.path = folder / "results.jsonl"
        self.settings: dict[str, Any] = {}
        self.sessions: list[dict[str, Any]] = []
        self.measurements: list[dict[str, Any]] = []
        self.complete = False
        if self.path.is_file():
            self._read()

    def _read(self) -> None:
        lines = self.path.read_text().splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except ValueError:
                if number == len(lines):
                    break  # cut off in the middle of a line
                raise BenchmarkError(f"{self.path}, line {number}: no JSON") from None
            self._take(record.pop("kind"), record)

    def _take(self, kind: str, record: dict[str, Any]) -> None:
        if kind == "settings":
            self.settings = record
        elif kind == "session":
            self.sessions.append(record)
        elif kind == "complete":
            self.complete = True
        else:
            self.measurements.append(record)

    def require_format(self) -> None:
        """What was measured otherwise is not reported as if it were this."""
        if self.settings.get("format") != FORMAT:
            raise BenchmarkError(
                f"{self.path} was written by an earlier benchmark, which measured otherwise; "
                "measure again"
            )

    def begin(self, settings: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        """Go on with what is there if it was interrupted; put it aside if it was complete."""
        settings = {"format": FORMAT, **json.loads(json.dumps(settings))}
        if self.complete:
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
            self.path.rename(self.path.with_name(f"results-until-{stamp}.jsonl"))
            self.settings, self.sessions, self.measurements = {}, [], []
            self.complete = False
        if self.measurements:
            changed = [key for key in settings if settings[key] != self.settings.get(key)]
            if changed:
                raise BenchmarkError(
                    f"{self.path} is of an interrupted run with other settings "
                    f"({', '.join(changed)}); choose another folder with --out, or start over "
                    "with --fresh"
                )
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            (self.path.parent / ".gitignore").write_text("*\n")
            self.path.unlink(missing_ok=True)
            self.sessions = []
            self.add("settings", settings)
        self.add("session", provenance)

    def add(self, kind: str, record: Mapping[str, Any]) -> None:
        text = json.dumps({"kind": kind, **record})
        with self.path.open("a+b") as file:
            if file.tell() and not self._ends_with_newline():
                file.truncate(self._end_of_last_line())
            file.write(text.encode() + b"\n")
        self._take(kind, json.loads(json.dumps(record)))

    def _ends_with_newline(self) -> bool:
        return self.path.read_bytes().endswith(b"\n")

    def _end_of_last_line(self) -> int:
        return self.path.read_bytes().rfind(b"\n") + 1

    def to_dict(self) -> dict[str, Any]:
        """Everything, for one JSON file."""
        return {
            "settings": self.settings,
            "sessions": self.sessions,
            "complete": self.complete,
            "measurements": self.measurements,
        }
