# SPDX-License-Identifier: Apache-2.0
"""Recorded drafts replayed through the policies under a cost curve (docs/simulation.md)."""
