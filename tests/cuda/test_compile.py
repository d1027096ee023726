# SPDX-License-Identifier: Apache-2.0
"""nvcc takes the CUDA sources without a warning or a spill, and nothing is missing among them. No
GPU and no CUDA build of PyTorch is needed: the compiler comes with requirements/dev.txt."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc" / "cuda"
KERNELS = sorted(SOURCES.glob("*.cu"))
TOOLKIT = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13"
ARCHITECTURES = ("80", "90")


def run(*command: object) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": f"{TOOLKIT / 'bin'}:{os.environ['PATH']}"},
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def symbols(path: Path, *flags: str) -> set[str]:
    """Of namespace vllm_echo::cuda."""
    names = run("nm", "--demangle", *flags, path).splitlines()
    found = (re.search(r"vllm_echo::cuda::\w+\(.*", name) for name in names)
    return {match.group() for match in found if match}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


@pytest.fixture(scope="module")
def objects(folder: Path) -> dict[Path, Path]:
    """Compiled kernels by source; what ptxas said lies beside each."""
    flags = (SOURCES / "nvcc_flags").read_text().split()
    flags += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    built = {}
    for kernel in KERNELS:
        built[kernel] = folder / f"{kernel.stem}.o"
        options = ("-std=c++17", "-Xcompiler", "-fPIC,-Wall", "-Xptxas", "-v,-warn-spills")
        report = run(TOOLKIT / "bin/nvcc", *flags, *options, "-c", kernel, "-o", built[kernel])
        built[kernel].with_suffix(".txt").write_text(report)
    return built


def test_there_are_kernels() -> None:
    assert len(KERNELS) >= 5


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.stem)
def test_no_kernel_spills(objects: dict[Path, Path], kernel: Path) -> None:
    report = objects[kernel].with_suffix(".txt").read_text()
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert len(spills) >= len(ARCHITECTURES)
    assert set(spills) == {("0", "0")}, report
    assert "warning" not in report.lower()


def test_every_launcher_that_the_operators_call_is_there(
    objects: dict[Path, Path], folder: Path
) -> None:
    """Compiled as in a CUDA build of PyTorch, whose library has what else is undefined."""
    include = Path(torch.__file__).parent / "include"
    target = folder / "ops.o"
    run(
        *("g++", "-std=c++20", "-O1", "-fPIC", "-Wall", "-Werror", "-DUSE_CUDA"),
        *("-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{include}", f"-I{TOOLKIT / 'include'}"),
        *("-c", SOURCES / "ops.cpp", "-o", target),
    )
    called = symbols(target, "--undefined-only")
    defined = set[str]().union(*(symbols(path, "--defined-only") for path in objects.values()))
    assert len(called) >= 5
    assert called <= defined


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA")
def test_a_build_with_cuda_says_what_is_missing() -> None:
    result = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        env={**os.environ, "ECHO_BUILD_CUDA": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "is a build for the CPU. Install one for CUDA, or unset ECHO_BUILD_CUDA" in result.stderr
