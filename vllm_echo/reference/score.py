# SPDX-License-Identifier: Apache-2.0
"""Node scores of the policy goodput, the obvious version: Platt scaling of one child."""

import math

from vllm_echo.core.acceptance import AcceptanceModel


def child_score(model: AcceptanceModel, depth: int, log_prob: float) -> float:
    """log P(accepted | parent accepted) of a child at ``depth`` with draft ``log_prob``."""
    if log_prob == -math.inf:
        return -math.inf
    intercept, slope = model.curves[min(depth, len(model.curves)) - 1]
    log_prob = min(log_prob, -1e-6)  # certainty has no finite logit
    logit = log_prob - math.log(-math.expm1(log_prob))
    return _log_sigmoid(intercept + slope * logit)


def _log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))
