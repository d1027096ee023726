# SPDX-License-Identifier: Apache-2.0
"""`vllm-echo demo`: a real model, a draft head for it, and an echo.json that joins them.

Only what is missing is made, so an interrupted run is finished by the next one, and an echo.json
that somebody has edited is left alone while the head it names exists.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm_echo.core.config import METHOD
from vllm_echo.errors import EchoError

MODEL_NAME = "SmolLM2-135M-Instruct"
HEAD_DIR = Path(__file__).resolve().parents[1] / "demo" / "eagle3_head"
HEAD_FILES = ("config.json", "model.safetensors")
OPTIONS_FILE = HEAD_DIR.parent / "options.json"
"""Everything of the demo's echo.json but method and model; gates and calibration were fitted by
`vllm-echo calibrate` to prompts.jsonl. The cost curve is the user's machine's."""


def default_dir() -> Path:
    """Where the demo lives unless told otherwise: in the user's cache."""
    from vllm_echo.cache import cache_dir

    return cache_dir() / "demo"


def run_demo(folder: Path | None) -> int:
    """Prepare the pair and print the one line of JSON that names it."""
    from vllm_echo.demo.convert import DemoModelError, prepare_model

    folder = (folder or default_dir()).expanduser().resolve()
    check_head_files()
    try:
        model = prepare_model(folder / MODEL_NAME)
        config = _write_config(folder / "echo.json")
    except DemoModelError as error:
        raise EchoError(str(error)) from None
    except OSError as error:
        raise EchoError(
            f"demo: {error.filename or folder}: {error.strerror}; name another folder with --dir"
        ) from None
    draft = json.loads(config.read_text(encoding="utf-8"))["model"]
    print("[vllm-echo] the demo is ready", file=sys.stderr)
    print(json.dumps({"model": str(model), "draft": draft, "speculative_config": str(config)}))
    return 0


def demo_options() -> dict[str, Any]:
    """The demo's options: num_speculative_tokens and echo."""
    return json.loads(OPTIONS_FILE.read_text(encoding="utf-8"))


def check_head_files() -> None:
    """The head is part of the project; without it there is nothing to draft with."""
    for name in HEAD_FILES:
        if not (HEAD_DIR / name).is_file():
            raise EchoError(
                f"demo: the draft head {HEAD_DIR / name} is missing; it belongs to the project: "
                "check it out again, or train one with examples/train_eagle3"
            )


def _write_config(path: Path) -> Path:
    """Write echo.json unless one is there whose head exists. An edited one is kept, but for
    the head of another checkout's demo: each checkout serves its own."""
    content = _read_config(path)
    head = Path(str(content.get("model")))
    if not (head / HEAD_FILES[0]).is_file():
        content = {"method": METHOD, "model": str(HEAD_DIR), **demo_options()}
    elif head != HEAD_DIR and head.parts[-3:] == HEAD_DIR.parts[-3:]:
        content["model"] = str(HEAD_DIR)
    else:
        return path
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(new, path)
    return path


def _read_config(path: Path) -> dict[str, Any]:
    """What echo.json says; nothing when there is none, or nothing readable in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
