# SPDX-License-Identifier: Apache-2.0
"""The fault of vLLM's sampling that comparisons at temperature > 0 are served without."""

import json
import subprocess
import sys

EXPAND = """
import sys
if "mended" in sys.argv:
    import benchmarks.serving.mended
import json, torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
current_platform.register_triton_kernel_overrides()
temperatures, ends = torch.tensor([0.5, 1.0, 0.25]), torch.tensor([2, 3, 6], dtype=torch.int32)
print(json.dumps(rejection_sampler.expand_batch_to_tokens(temperatures, ends, 6).tolist()))
"""


def expanded(*arguments: str) -> list[float]:
    """Temperatures of three requests with 2, 1 and 3 positions, as vLLM's sampler sees them."""
    done = subprocess.run(
        [sys.executable, "-c", EXPAND, *arguments], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_the_sampler_divides_by_each_positions_temperature_only_where_it_is_mended():
    """When the second half fails, vLLM does it by itself, and mended.py can go."""
    expected = [0.5, 0.5, 1.0, 0.25, 0.25, 0.25]
    assert expanded("mended") == expected
    assert expanded() != expected
