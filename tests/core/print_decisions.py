# SPDX-License-Identifier: Apache-2.0
"""Prints a digest of many steps' decisions, for the test that starts this in other processes."""

import hashlib
import random

from tests.core.kit import as_lists, decide, random_step


def digest_of_decisions() -> str:
    digest = hashlib.sha256()
    for seed in range(60):
        decision = decide(random_step(random.Random(seed)))
        digest.update(repr((as_lists(decision.trees), decision.forwards)).encode())
    return digest.hexdigest()


if __name__ == "__main__":
    print(digest_of_decisions())
