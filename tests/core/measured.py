# SPDX-License-Identifier: Apache-2.0
"""A cost curve and a calibration as `vllm-echo profile` and `calibrate` write them, and changes."""

import json
from typing import Any

PROFILE: dict[str, Any] = {
    "step": [[1, 20.0], [8, 21.5], [64, 40.25]],
    "roots": [0.2, 0.01],
    "layer": [0.3, 0.02],
    "catch_up": [0.1, 0.0],
    "control": [0.05, 0.001],
    "context_us": 0.25,
    "node_context_us": 0.125,
}
_KIND: dict[str, Any] = {
    "curves": [[0.1, 0.9], [-0.2, 1.1]],
    "best_child": [0.7, 0.6, 0.55],
    "supply": [[0.1, 4.0, 1.5, [0.8, 0.5]], [0.5, 1.0, 0.7, [0.0, 0.0]], [0.6, 0.8, 0.6, []]],
}
CALIBRATION: dict[str, Any] = {"greedy": _KIND, "sampled": _KIND | {"best_child": [0.5]}}

MISSING = object()
"""Instead of a value: the key is taken out."""


def changed(value: Any, *path: str | int, to: Any) -> Any:
    """A copy of ``value`` in which the place at ``path`` holds ``to``."""
    result = json.loads(json.dumps(value))  # shares no part with others, as deepcopy would
    if not path:
        return to
    place = result
    for key in path[:-1]:
        place = place[key]
    if to is MISSING:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return result
