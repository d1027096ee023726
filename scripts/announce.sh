#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# announce.sh HOST PORT MODEL PID: waits until the server answers and prints a request to try.
# Ends with the server, whose process is PID.
set -euo pipefail
host=$1 port=$2 model=$3 server=$4
[ "$host" != 0.0.0.0 ] || host=127.0.0.1

# Python, since curl may not be installed and an error page must not count as an answer.
answers() {
  .venv/bin/python -c 'import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5)' "http://$host:$port/health" 2> /dev/null
}

start=$SECONDS
until answers; do
  kill -0 "$server" 2> /dev/null || exit 0
  sleep 2
  if [ $(((SECONDS - start) / 30)) -gt "${said:-0}" ]; then
    said=$(((SECONDS - start) / 30))
    echo "[vllm-echo] still starting ($((SECONDS - start)) s)"
  fi
done
cat << END

[vllm-echo] ready after $((SECONDS - start)) s. Try:

  curl http://$host:$port/v1/chat/completions -H 'Content-Type: application/json' -d '{"model": "$model", "messages": [{"role": "user", "content": "Name the seven days of the week."}], "max_tokens": 64, "temperature": 0}'

Accepted tokens: curl -s http://$host:$port/metrics | grep spec_decode      Stop: Ctrl-C
END
