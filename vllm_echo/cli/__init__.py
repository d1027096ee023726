# SPDX-License-Identifier: Apache-2.0
"""The `vllm-echo` command: ``main`` has the options; ``doctor`` and ``demo`` are commands whose
work is small. `calibrate`, `profile` and `patch` live beside what they are about."""
