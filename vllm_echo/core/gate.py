# SPDX-License-Identifier: Apache-2.0
"""Stage *gate*: may a request go deeper? (arXiv:2604.09603, sparse confidence gates.)"""

from vllm_echo.core.config import EchoConfig


class SparseGates:
    """Thresholds on the confidence of a layer, at a few depths only.

    The gate at depth d judges the layer drafted *from* depth d: its confidence is
    c[d] = exp(max score of depth d + 1), the probability of the most likely path so far.
    c > threshold lets the request go deeper; otherwise it is truncated there, and costs
    no further draft work. Between gates there is no decision. The paper leaves open which
    layer a root gate looks at; see docs/algorithm.md for why it is this one.
    """

    def __init__(self, thresholds: dict[int, float]):
        self._thresholds = dict(sorted(thresholds.items()))

    @classmethod
    def from_config(cls, config: EchoConfig) -> "SparseGates":
        return cls({gate.depth: gate.threshold for gate in config.gates})

    def at_every_depth(self, max_depth: int) -> "SparseGates":
        """Dense gates: linear between the sparse ones, and as the nearest beyond them."""
        if not self._thresholds:
            return self
        depths = list(self._thresholds)
        dense = {}
        for depth in range(max_depth):
            low = max((d for d in depths if d <= depth), default=depths[0])
            high = min((d for d in depths if d >= depth), default=depths[-1])
            share = (depth - low) / (high - low) if high > low else 0.0
            dense[depth] = (1 - share) * self._thresholds[low] + share * self._thresholds[high]
        return SparseGates(dense)

    def with_threshold(self, threshold: float) -> "SparseGates":
        """The same gates, all with one threshold."""
        return SparseGates(dict.fromkeys(self._thresholds, threshold))

    def has_gate(self, depth: int) -> bool:
        return depth in self._thresholds

    def threshold(self, depth: int) -> float | None:
        """None where there is no gate."""
        return self._thresholds.get(depth)
