# SPDX-License-Identifier: Apache-2.0
"""What can be simulated, by name.

``plain``         no speculation
``chain-K``       K likeliest children in a row, always in full: what vLLM's ``eagle3`` drafts
``eagle3-tree``   depth 3, top-k 3, 5 nodes, always in full: what the paper's EAGLE-3 starts with
``static``        depth and nodes of the recorded trees, always in full
``ddd``           as static, but the depth is dynamic
``echo``, ``dense``, ``fixed-threshold``, ``goodput``    K_max follows the load

and after the last five ``-K`` for a constant K_max (``echo-32``), ``-no-transfer``, ``-no-width``.
"""

import re
from dataclasses import dataclass

from benchmarks.simulate.replay import RecordedTrees
from vllm_echo.core.acceptance import Calibration
from vllm_echo.core.config import AUTO, MAX_NODES_PER_STEP, EchoConfig, Gate
from vllm_echo.core.cost import CostCurve

PLAIN = "plain"
BASELINE = "eagle3-tree"
DEFAULT_NAMES = (
    PLAIN,
    *(f"chain-{k}" for k in range(1, 6)),
    BASELINE,
    "static",
    "ddd",
    "echo",
    "goodput",
)
_ELASTIC = ("echo", "dense", "fixed-threshold", "goodput")
_NAME = re.compile(
    rf"(?P<policy>{'|'.join((*_ELASTIC, 'ddd'))})(-(?P<k_max>\d+))?"
    r"(?P<no_transfer>-no-transfer)?(?P<no_width>-no-width)?"
)


@dataclass(frozen=True)
class Tuning:
    """What `vllm-echo calibrate` found for a head; None where it has not run."""

    calibration: Calibration | None = None
    gates: tuple[Gate, ...] | None = None


def make_config(
    name: str, recorded: RecordedTrees, curve: CostCurve, tuning: Tuning
) -> EchoConfig | None:
    """The options of ``name`` for trees no larger than the recorded ones; None for ``plain``."""
    if name == PLAIN:
        return None
    if match := re.fullmatch(r"chain-(\d+)", name):
        depth = int(match[1])
        return _fixed("chain", depth, 1, depth, recorded)
    if name == BASELINE:
        return _fixed("static", 3, 3, 5, recorded)
    if name == "static":
        return _fixed("static", recorded.max_depth, recorded.top_k, recorded.num_nodes, recorded)
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"--policies: {name} is none of those in benchmarks/simulate/plans.py")
    return _elastic(match, recorded, curve, tuning)


def depends_on_curve(config: EchoConfig | None) -> bool:
    """Does the curve decide anything, or does it only say what decisions cost?"""
    return config is not None and config.needs_profile


def _fixed(
    policy: str, depth: int, top_k: int, num_nodes: int, recorded: RecordedTrees
) -> EchoConfig:
    if depth > recorded.max_depth or top_k > recorded.top_k:
        raise ValueError(
            f"{policy} of depth {depth} and top-k {top_k}: the trace was recorded with depth "
            f"{recorded.max_depth} and top-k {recorded.top_k}; record larger trees"
        )
    return EchoConfig(
        num_speculative_tokens=num_nodes,
        policy=policy,
        k_max=MAX_NODES_PER_STEP,
        max_depth=depth,
        target_depth=depth,
        top_k=top_k,
        gates=(),
    )


def _elastic(
    match: re.Match[str], recorded: RecordedTrees, curve: CostCurve, tuning: Tuning
) -> EchoConfig:
    policy = match["policy"]
    k_max: int | str = int(match["k_max"]) if match["k_max"] else AUTO
    if policy == "ddd" and k_max == AUTO:
        k_max = MAX_NODES_PER_STEP
    options = {
        "num_speculative_tokens": recorded.num_nodes,
        "policy": policy,
        "k_max": k_max,
        "max_depth": recorded.max_depth,
        "top_k": recorded.top_k,
        "transfer": not match["no_transfer"],
        "width": not match["no_width"],
    }
    if tuning.gates is not None:
        gates = [gate for gate in tuning.gates if gate.depth <= recorded.max_depth]
        options["gates"] = [{"depth": gate.depth, "threshold": gate.threshold} for gate in gates]
    config = EchoConfig.from_dict(options)
    return EchoConfig(**{**vars(config), "profile": curve, "calibration": tuning.calibration})
