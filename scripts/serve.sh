#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Serves a model with ECHO: scripts/serve.sh [more options of `vllm serve`]
#
# Environment, all optional: HOST, PORT, MODEL and SPECULATIVE_CONFIG (default: the demo pair),
# VLLM_CPU_KVCACHE_SPACE (GiB), MAX_MODEL_LEN.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
host=${HOST:-127.0.0.1}
port=${PORT:-8000}

if "$bin/python" -c 'import socket, sys
sys.exit(socket.socket().connect_ex((sys.argv[1], int(sys.argv[2]))) != 0)' \
  "${host/#0.0.0.0/127.0.0.1}" "$port" 2> /dev/null; then
  echo "[vllm-echo] something answers on $host:$port already; stop it, or choose another port:" \
    "make serve PORT=$((port + 1))" >&2
  exit 2
fi

if [ -z "${MODEL:-}" ] || [ -z "${SPECULATIVE_CONFIG:-}" ]; then
  demo=$("$bin/vllm-echo" demo | tail -n 1)
  from_demo() { "$bin/python" -c 'import json, sys; print(json.loads(sys.argv[1])[sys.argv[2]])' "$demo" "$1"; }
  MODEL=${MODEL:-$(from_demo model)}
  SPECULATIVE_CONFIG=${SPECULATIVE_CONFIG:-$(from_demo speculative_config)}
fi
name=$(basename "$MODEL")

# vLLM asks for Intel's OpenMP on x86 (it came with the pinned packages); without it speculation
# loses much of its gain. tcmalloc helps too, where it is installed (apt: libtcmalloc-minimal4).
preload=${LD_PRELOAD:-}
openmp=.venv/lib/libiomp5.so
case $preload in *libiomp* | *libomp* | *libgomp*) openmp= ;; esac  # a process holds one of them
for library in $openmp \
  /usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4 /usr/lib/x86_64-linux-gnu/libtcmalloc.so.4; do
  if [ -f "$library" ]; then
    preload=$preload${preload:+:}$(realpath "$library")
  fi
done

export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-2}
export VLLM_USE_V2_MODEL_RUNNER=0  # echo's CPU adapter belongs to the V1 runner
export VLLM_NO_USAGE_STATS=${VLLM_NO_USAGE_STATS:-1}

echo "[vllm-echo] starting $name on http://$host:$port (a first start compiles the model: a minute or more)"
scripts/announce.sh "$host" "$port" "$name" $$ &
LD_PRELOAD=$preload exec "$bin/vllm" serve "$MODEL" --speculative-config "$SPECULATIVE_CONFIG" \
  --host "$host" --port "$port" --served-model-name "$name" \
  --max-model-len "${MAX_MODEL_LEN:-4096}" "$@"
