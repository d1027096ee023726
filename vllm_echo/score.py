# SPDX-License-Identifier: Apache-2.0
"""Node scores: logs of probabilities that multiply along a path, so no child exceeds its parent."""

import torch

from vllm_echo.acceptance import Calibration


class CalibratedScores:
    """Draft log-probabilities to log acceptance probabilities (``acceptance.py`` has the model)."""

    def __init__(self, calibration: Calibration, max_depth: int):
        self._curves = torch.tensor(
            [[model.curve_at(d + 1) for d in range(max_depth)] for model in calibration.models()]
        )

    def __call__(self, depth: int, log_probs: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """log P(accepted | parent accepted) of children at ``depth`` with draft ``log_probs``
        [A, ...]; ``sampled`` [A] bool picks the kind of request. -inf (no child) stays -inf."""
        curves = self._curves[sampled.long(), depth - 1]
        shape = (-1, *[1] * (log_probs.dim() - 1))
        intercept, slope = curves[:, 0].view(shape), curves[:, 1].view(shape)
        log_probs = log_probs.clamp(max=-1e-6)  # q = 1 has no finite logit
        logit = log_probs - log_probs.expm1().neg_().log_()
        return torch.nn.functional.logsigmoid(torch.addcmul(intercept, slope, logit))
