# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with one fault of vLLM 0.32 mended: python -m benchmarks.serving.mended serve ...

On a CPU without Triton, vLLM's own speculation never receives the temperature of the positions that
it verifies: ``_expand_kernel_impl`` writes floats into an integer copy of its output, and what the
sampler divides by is uninitialised memory. Drafts of sampled requests are then accepted by chance,
next to never. A comparison at temperature > 0 would be won against a fault, so vLLM's speculation
is served from here; echo and plain decoding do not use this function.

Every process of the server imports this module as its main module, and so mends itself.
"""

import sys
from typing import Any

import torch
from vllm.utils import cpu_triton_utils


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """[num_tokens]: each request's value, once for each of its tokens; ``replace_from`` becomes
    ``replace_to``."""
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    chosen = values.masked_fill(values == replace_from, replace_to)
    output.copy_(chosen.repeat_interleave(counts))


cpu_triton_utils._expand_kernel_impl = expand

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
