# SPDX-License-Identifier: Apache-2.0
"""Builds csrc/cuda for the CPU (on_cpu/cuda_runtime_api.h), so that kernels run where no GPU is.

Only two things of CUDA are no C++: the launch, and dynamic shared memory. Both are rewritten.
"""

import ctypes
import hashlib
import os
import re
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
ON_CPU = Path(__file__).parent / "on_cpu"
BUILD = ROOT / "build" / "cuda_on_cpu"
LAUNCH = re.compile(r"([\w:]+(?:<[^;<>]*>)?)<<<(.*?)>>>\((.*?)\);", re.DOTALL)
SHARED = re.compile(r"extern __shared__ ([\w:]+) (\w+)\[\];")
FLAGS = ["-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Werror"]
FLAGS += ["-Wno-unknown-pragmas", "-Wno-missing-braces", "-DECHO_CUDA_ON_CPU"]
FLAGS += ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
FLAGS += os.environ.get("ECHO_EMULATION_FLAGS", "").split()  # scripts/sanitize.sh


def as_cpp(source: str) -> str:
    """CUDA source as C++ over on_cpu."""

    def launch(match: re.Match[str]) -> str:
        kernel, config, arguments = match.groups()
        grid, threads, shared, _ = (part.strip() for part in config.split(","))
        call = f"[=] {{ {kernel}({arguments}); }}"
        return f"cuda_on_cpu::launch({grid}, {threads}, {shared}, {call});"

    source, num_launches = LAUNCH.subn(launch, source)
    assert num_launches > 0
    return SHARED.sub(r"\1* \2 = reinterpret_cast<\1*>(cuda_on_cpu::dynamic_shared());", source)


def build() -> ctypes.CDLL:
    """Loads the emulated operators as torch.ops.vllm_echo_cuda_on_cpu."""
    kernels = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    everything = sorted([*(ROOT / "csrc").rglob("*.*"), *ON_CPU.iterdir(), Path(__file__)])
    digest = hashlib.sha256(" ".join([torch.__version__, *FLAGS]).encode())
    for path in everything:
        digest.update(path.read_bytes())
    library = BUILD / f"{digest.hexdigest()[:16]}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        sources = [ROOT / "csrc" / "cuda" / "ops.cpp"]
        for kernel in kernels:
            sources.append(BUILD / f"{kernel.stem}.cpp")
            sources[-1].write_text(as_cpp(kernel.read_text()))
        torch_include = Path(torch.__file__).parent / "include"
        torch_library = Path(torch.__file__).parent / "lib"
        folders = [ON_CPU, ROOT / "csrc" / "cuda", torch_include]
        command = ["g++", *FLAGS, *(f"-I{folder}" for folder in folders), *map(str, sources)]
        partial = library.with_suffix(".partial")
        command += ["-o", str(partial), f"-L{torch_library}", "-ltorch_cpu", "-lc10"]
        subprocess.run(command, check=True)
        partial.replace(library)
    torch.ops.load_library(str(library))
    return ctypes.CDLL(str(library))
