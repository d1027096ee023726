# SPDX-License-Identifier: Apache-2.0
"""Builds the operators in csrc/ against the PyTorch that is already installed.

    pip install -e . --no-deps --no-build-isolation

Build isolation stays off: an isolated build would fetch some PyTorch of its own. The operators use
PyTorch's stable ABI only, so a build against 2.13 also loads into later versions.
"""

import os
import sys
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

# The oldest PyTorch whose stable ABI has everything csrc/ uses (parallel_for).
STABLE_ABI_VERSION = "0x020a000000000000"  # 2.10

SOURCES = ["csrc/bindings.cpp", *sorted(str(path) for path in Path("csrc/cpu").glob("*.cpp"))]


def refuse_cuda() -> None:
    """A request for CUDA must not quietly become a CPU build."""
    if os.environ.get("ECHO_BUILD_CUDA", "0") not in ("", "0"):
        sys.exit(
            "ECHO_BUILD_CUDA is set, but this version of vllm-echo has no CUDA sources yet: they "
            "come with the CUDA adapter. Unset ECHO_BUILD_CUDA to build the CPU operators."
        )


def cpu_extension() -> CppExtension:
    """The operators. No -march flag: csrc/cpu chooses the instruction set when it runs."""
    return CppExtension(
        name="vllm_echo._C",
        sources=SOURCES,
        depends=[str(path) for path in Path("csrc").rglob("*.h")],
        extra_compile_args={
            "cxx": ["-O3", "-g0", "-Wall", f"-DTORCH_TARGET_VERSION={STABLE_ABI_VERSION}"],
        },
        py_limited_api=True,
    )


refuse_cuda()
setup(
    ext_modules=[cpu_extension()],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
