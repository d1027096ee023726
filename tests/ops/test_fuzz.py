# SPDX-License-Identifier: Apache-2.0
"""A few seconds of what `make fuzz` does for as long as it is told to."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_malformed_trees_lead_nowhere(tmp_path: Path) -> None:
    """The program fails, too, if it packed nothing, refused nothing or accepted nothing."""
    program = tmp_path / "fuzz_trees"
    flags = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    source = ROOT / "csrc" / "fuzz" / "fuzz_trees.cpp"
    command = [os.environ.get("CXX", "g++"), *flags, *sanitizers, str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    # What vLLM preloads into its children would come before the sanitizer.
    alone = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    result = subprocess.run([program, "5", "1"], env=alone, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "nodes accepted" in result.stdout
