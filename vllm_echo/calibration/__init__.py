# SPDX-License-Identifier: Apache-2.0
"""Measuring a head and a machine: draft traces, the fit of gates and acceptance, cost curves."""
