# SPDX-License-Identifier: Apache-2.0
"""Node scores: logs of probabilities that multiply along a path, so no child exceeds its parent."""

import torch

from vllm_echo import ops
from vllm_echo.core.acceptance import Calibration
from vllm_echo.core.decision import Decision


def child_scores(
    decision: Decision,
    depth: int,
    log_probs: torch.Tensor,
    requests: torch.Tensor,
    sampled: torch.Tensor,
) -> torch.Tensor:
    """[A, F, K] float32: what children at ``depth`` add to their paths' scores.

    Draft ``log_probs`` [A, F, K] of the ``requests`` [A] int64; under ``Rule.PRICE`` the log of
    P(accepted | parent accepted) instead (``acceptance.py`` has the model), ``sampled`` [R] bool
    picking the kind of request. -inf (no child) stays -inf.
    """
    if decision.prices is None:
        return log_probs
    return ops.score_children(log_probs, requests, sampled, decision.prices.curves[depth - 1])


def score_curves(calibration: Calibration, max_depth: int) -> torch.Tensor:
    """``Prices.curves`` of layers 1 to ``max_depth``."""
    depths = range(1, max_depth + 1)
    return torch.tensor([[m.curve_at(depth) for m in calibration.models()] for depth in depths])
