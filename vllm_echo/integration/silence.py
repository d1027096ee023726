# SPDX-License-Identifier: Apache-2.0
"""Says in the log, once a reason, why a server has drafted for nobody for a long time."""

import logging

from vllm_echo.core.stats import StepStats, Undrafted
from vllm_echo.integration.log import echo_logger

logger = echo_logger(__name__)

PATIENCE = 200
"""Steps on end in which requests went on and none had a candidate: a few seconds."""

PASSING = (Undrafted.PREFILL, Undrafted.LAST_TOKEN)
"""Every request meets these, and no server stays in them."""

REASONS = {
    Undrafted.NO_SAMPLE: (
        logging.WARNING,
        "the target's logits are no numbers (NaN), so nothing could be sampled; its weights are "
        "damaged or overflow in this type: compare with --dtype float32",
    ),
    Undrafted.THINKING_BUDGET: (
        logging.INFO,
        "requests have a thinking_token_budget, which goes without drafts",
    ),
    Undrafted.MAX_MODEL_LEN: (
        logging.INFO,
        "requests have reached the end of their context; --max-model-len would give more",
    ),
    Undrafted.HEAD_CONTEXT: (
        logging.WARNING,
        "requests are longer than the head's context (max_model_len of the speculative "
        "configuration, or max_position_embeddings of the head's config.json); a head made for "
        "longer texts would draft for them",
    ),
    Undrafted.NO_CURVE: (
        logging.WARNING,
        "the policy needs a cost curve and has none; give the one that `vllm-echo profile` writes",
    ),
    Undrafted.NO_BUDGET: (logging.INFO, "echo.k_max leaves no node; raise it to draft again"),
    Undrafted.NO_GAIN: (
        logging.INFO,
        "by the cost curve, or by what the steps have shown, no candidate pays at this load, and "
        "plain decoding is faster; if that is a surprise, `vllm-echo profile` measures this "
        "machine anew and `vllm-echo calibrate` the head",
    ),
    Undrafted.NO_ROWS: (
        logging.WARNING,
        "requests and prompts take all rows of a step; raise --max-num-batched-tokens",
    ),
    Undrafted.NO_SCORE: (
        logging.WARNING,
        "the head's logits are no numbers (NaN); its weights are damaged or overflow in this type: "
        "compare with --dtype float32, or give another head",
    ),
}


class Silence:
    """Sees every step's counts. ``speaks`` is false on all ranks but one."""

    def __init__(self, speaks: bool):
        self._speaks = speaks
        self._steps = 0
        self._counts = StepStats()
        self._said: set[Undrafted] = set()

    def see(self, stats: StepStats) -> None:
        """Count a step; say the chief reason once no request has had a candidate for long."""
        if any(stats.drafted):
            self._steps, self._counts = 0, StepStats()
            return
        if not self._speaks or sum(stats.undrafted) == _passing(stats):
            return
        self._steps += 1
        self._counts.merge(StepStats(undrafted=stats.undrafted))
        if self._steps < PATIENCE:
            return
        counts = self._counts.undrafted
        reason = max(REASONS, key=lambda reason: counts[reason] if reason < len(counts) else 0)
        self._steps, self._counts = 0, StepStats()
        if reason not in self._said:
            self._said.add(reason)
            level, text = REASONS[reason]
            logger.log(level, "ECHO has drafted for nobody in %d steps: %s", PATIENCE, text)


def _passing(stats: StepStats) -> int:
    return sum(stats.undrafted[reason] for reason in PASSING if reason < len(stats.undrafted))
