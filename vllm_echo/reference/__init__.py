# SPDX-License-Identifier: Apache-2.0
"""The obvious version of every stage: plain loops over plain lists, slow and readable.

The tests' oracle. Nothing outside tests and benchmarks may import it.
"""
