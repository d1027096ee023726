# SPDX-License-Identifier: Apache-2.0
"""Node scores: logs of probabilities that multiply along a path, so no child exceeds its parent."""

import torch

from vllm_echo import ops
from vllm_echo.core.acceptance import Calibration


class CalibratedScores:
    """Draft log-probabilities to log acceptance probabilities (``acceptance.py`` has the model)."""

    def __init__(self, calibration: Calibration, max_depth: int):
        self._curves = [
            torch.tensor([model.curve_at(depth) for model in calibration.models()])
            for depth in range(1, max_depth + 1)
        ]

    def __call__(
        self, depth: int, log_probs: torch.Tensor, requests: torch.Tensor, sampled: torch.Tensor
    ) -> torch.Tensor:
        """log P(accepted | parent accepted) of children at ``depth`` with draft ``log_probs``
        [A, F, K], of the ``requests`` [A] int64; ``sampled`` [R] bool picks the kind of request.
        -inf (no child) stays -inf."""
        return ops.score_children(log_probs, requests, sampled, self._curves[depth - 1])
