# SPDX-License-Identifier: Apache-2.0
"""Stage *gate*: may a request go deeper? (arXiv:2604.09603, sparse confidence gates.)"""

import math

import torch

from vllm_echo.config import EchoConfig


class SparseGates:
    """Thresholds on the confidence of a layer, at a few depths only.

    The gate at depth d judges the layer drafted *from* depth d: its confidence is
    c[d] = exp(max score of depth d + 1), the probability of the most likely path so far.
    c > threshold lets the request go deeper; otherwise it is truncated there, and costs
    no further draft work. Between gates there is no decision. The paper leaves open which
    layer a root gate looks at; see docs/algorithm.md for why it is this one.
    """

    def __init__(self, thresholds: dict[int, float]):
        self._thresholds = thresholds

    @classmethod
    def from_config(cls, config: EchoConfig) -> "SparseGates":
        return cls({gate.depth: gate.threshold for gate in config.gates})

    def passes(self, depth: int, confidence: torch.Tensor) -> torch.Tensor:
        """[R] bool from ``confidence`` [R] float32 of the layer drafted from ``depth``."""
        threshold = self._thresholds.get(depth, -math.inf)
        return confidence > threshold


def layer_confidence(scores: torch.Tensor) -> torch.Tensor:
    """[R] float32: c = exp(max score) of a layer's ``scores`` [R, M]."""
    return scores.amax(dim=1).exp()
