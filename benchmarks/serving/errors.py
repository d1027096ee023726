# SPDX-License-Identifier: Apache-2.0
"""What ends a benchmark with one line instead of a traceback."""


class BenchmarkError(Exception):
    """Its text is all that the user sees; exit status 2."""
