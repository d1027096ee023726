# SPDX-License-Identifier: Apache-2.0
"""Prints digests of many steps' decisions, for the test that starts this in other processes."""

import hashlib
import json
import random

from tests.core.kit import as_lists
from tests.core.steps import decide, random_step
from vllm_echo.core.config import POLICIES


def digests_of_decisions() -> dict[str, str]:
    """By policy: offers, trees, and who took part in which forward."""
    return {policy: _digest(policy) for policy in POLICIES}


def _digest(policy: str) -> str:
    digest = hashlib.sha256()
    for seed in range(40):
        step = random_step(random.Random(seed), [1, 3, 9, 40], policy=policy)
        decision = decide(step)
        story = (step.offer(), as_lists(decision.trees), decision.forwards)
        digest.update(repr(story).encode())
    return digest.hexdigest()


if __name__ == "__main__":
    print(json.dumps(digests_of_decisions()))
