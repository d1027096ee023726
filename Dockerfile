# SPDX-License-Identifier: Apache-2.0
# A CPU image that serves the demo with ECHO; docker/README.md has the commands.
FROM python:3.12-slim-bookworm

# g++ stays: vLLM compiles the model's kernels when it starts.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make libtcmalloc-minimal4 libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/vllm-echo

# The large and rarely changed layers first: install.sh stamps each step, so that its second run,
# with the sources there, only builds and patches.
COPY scripts/install.sh scripts/
COPY requirements requirements
RUN PIP_NO_CACHE_DIR=1 scripts/install.sh --packages-only
COPY . .
RUN PIP_NO_CACHE_DIR=1 scripts/install.sh && .venv/bin/vllm-echo demo

ENV PATH=/opt/vllm-echo/.venv/bin:$PATH HOST=0.0.0.0 PORT=8000
EXPOSE 8000
ENTRYPOINT ["scripts/serve.sh"]
