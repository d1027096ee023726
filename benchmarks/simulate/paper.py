# SPDX-License-Identifier: Apache-2.0
"""What the paper publishes (arXiv:2604.09603), as far as a simulation can stand beside it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """SGLang on 8 H100 80 GB, greedy, bf16, batch 8 to 256, at most 1024 new tokens."""

    best_gain: float
    """Largest gain of echo over EAGLE-3 at any of the batch sizes."""
    eagle3_at_256: int | None = None
    echo_at_256: int | None = None
    """Tokens per second."""


PUBLISHED = {
    "Llama-3.1-8B": Published(0.0792, 10_703, 11_551),
    "Llama-3.3-70B": Published(0.1296),
    "Qwen3-8B": Published(0.1000),
    "Qwen3-235B-A22B": Published(0.1495, 2_803, 3_207),
}
BATCHES = (8, 256)
"""The range of batch sizes in which ``best_gain`` was looked for."""

NOT_COMPARABLE = """\
- The heads: drafts and acceptances here are those of the pair that was recorded, whose accepted
  lengths are given above; the paper's heads are others and accept more.
- The trees: here no larger than the recorded ones. The paper's EAGLE-3 starts with depth 3, top-k
  3, 5 tokens (`eagle3-tree`, read as 5 candidates); it is not known to us what it was at 256.
- The machine: a roofline with the fractions printed above. It has no kernels, no imbalance and no
  queue, so absolute tokens per second are upper bounds; ratios are what can be set side by side.
- The prompts: the recorded requests, shorter than the paper's."""
