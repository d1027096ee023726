# SPDX-License-Identifier: Apache-2.0
"""Builds the operators in csrc/ against the PyTorch that is already installed.

    pip install -e . --no-deps --no-build-isolation

With ECHO_BUILD_CUDA=1 in the environment the CUDA operators are built, too (sm_80 and sm_90).

Build isolation stays off: an isolated build would fetch some PyTorch of its own. The operators use
PyTorch's stable ABI only, so a build against 2.13 also loads into later versions.
"""

import os
import sys
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

# The oldest PyTorch whose stable ABI has everything csrc/ uses (parallel_for).
STABLE_ABI_VERSION = "0x020a000000000000"  # 2.10

SOURCES = ["csrc/bindings.cpp", *sorted(str(path) for path in Path("csrc/cpu").glob("*.cpp"))]


CUDA_SOURCES = [
    str(path) for path in sorted(Path("csrc/cuda").glob("*.c*")) if path.suffix != ".cuh"
]
CUDA_ARCHITECTURES = "8.0;9.0"
CXX_FLAGS = ["-O3", "-g0", "-Wall", f"-DTORCH_TARGET_VERSION={STABLE_ABI_VERSION}"]


def wants_cuda() -> bool:
    """Whether CUDA operators are asked for. A GPU in the machine decides nothing."""
    return os.environ.get("ECHO_BUILD_CUDA", "0") not in ("", "0")


def require_toolkit() -> None:
    """A request for CUDA must not quietly become a CPU build."""
    instead = "or unset ECHO_BUILD_CUDA to build the CPU operators alone."
    if torch.version.cuda is None:
        sys.exit(
            f"ECHO_BUILD_CUDA is set, but PyTorch {torch.__version__} is a build for the CPU. "
            f"Install one for CUDA, {instead}"
        )
    if CUDA_HOME is None or not (Path(CUDA_HOME) / "bin" / "nvcc").exists():
        sys.exit(
            "ECHO_BUILD_CUDA is set, but there is no nvcc. Install the CUDA toolkit "
            f"{torch.version.cuda}, name its folder in CUDA_HOME, {instead}"
        )


def extension() -> Extension:
    """The operators. No -march flag: csrc/cpu chooses the instruction set when it runs."""
    options = {
        "name": "vllm_echo._C",
        "depends": [str(path) for path in Path("csrc").rglob("*.*h")],
        "py_limited_api": True,
    }
    if not wants_cuda():
        return CppExtension(sources=SOURCES, extra_compile_args={"cxx": CXX_FLAGS}, **options)
    require_toolkit()
    architectures = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", CUDA_ARCHITECTURES)
    built_for = f'-DECHO_CUDA_ARCHITECTURES="{architectures.replace(";", ",").replace(" ", ",")}"'
    return CUDAExtension(
        sources=[*SOURCES, *CUDA_SOURCES],
        extra_compile_args={
            "cxx": [*CXX_FLAGS, "-DUSE_CUDA", built_for],
            "nvcc": Path("csrc/cuda/nvcc_flags").read_text().split(),
        },
        **options,
    )


setup(
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
