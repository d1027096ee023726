#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the CPU operators with AddressSanitizer and UndefinedBehaviorSanitizer beside the ordinary
# ones, in build/sanitized, and runs the operator tests over them; then the CUDA kernels on a CPU, with
# AddressSanitizer. Arguments go to pytest.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$root/.venv/bin/python
there=$root/build/sanitized
# The C++ library comes with it: otherwise its exceptions are not known to the sanitizer in time.
runtime="$("${CXX:-g++}" -print-file-name=libasan.so) $("${CXX:-g++}" -print-file-name=libstdc++.so)"
flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"

cd "$root"
mkdir -p "$there"
rm -rf "$there/vllm_echo" "$there/tests"
CFLAGS=$flags CXXFLAGS=$flags LDFLAGS=-fsanitize=address,undefined MAX_JOBS=${MAX_JOBS:-$(nproc)} \
  "$python" setup.py -q build_ext --build-lib "$there/built" --build-temp "$there/objects" \
  > "$there/build.log" || { cat "$there/build.log" >&2; exit 1; }
cp -r vllm_echo tests pyproject.toml "$there"
rm -f "$there"/vllm_echo/_C*.so
cp "$there"/built/vllm_echo/_C*.so "$there/vllm_echo/"

# PyTorch keeps its own memory to the end: no leaks are looked for.
export LD_PRELOAD=$runtime UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0
(
  cd "$there"
  "$python" -m pytest -q -p no:cacheprovider tests/ops --ignore tests/ops/test_fuzz.py \
    --deselect tests/ops/test_door.py::test_a_missing_build_says_how_to_build "$@"
)
ECHO_EMULATION_FLAGS="-fsanitize=address -fno-omit-frame-pointer" \
  "$python" -m pytest -q -p no:cacheprovider tests/cuda/test_kernels.py "$@"
