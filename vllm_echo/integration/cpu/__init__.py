# SPDX-License-Identifier: Apache-2.0
"""Adapter for vLLM's V1 runner on a CPU: worker, runner, attention, drafter, verifier."""
