# SPDX-License-Identifier: Apache-2.0
"""Every option of `--speculative-config '{"method": "echo", ...}'`, documented and validated here.

    {"method": "echo",
     "model": "path/or/hub-name/of/an/EAGLE-3-head",     required
     "num_speculative_tokens": 8,     most nodes that one request may have in a step, 1..255
     "echo": {
       "policy": "goodput",           one of POLICIES
       "k_max": "auto",               most nodes of a whole step, all requests together; 0 drafts
                                      nothing, "auto" follows the load by the cost curve
       "max_depth": 6,                deepest level a tree may grow to
       "target_depth": 4,             depth of static and chain, of the second default gate, and
                                      from which ddd may stop
       "top_k": 3,                    children drafted for an expanded node
       "gates": [{"depth": 0, "threshold": 0.2}, {"depth": 4, "threshold": 0.3}],
       "threshold": 0.3,              of fixed-threshold's gates, and of ddd's beam
       "transfer": true,              false: every request keeps its even share of k_max
       "width": true,                 false: what depth leaves of the budget is not spent
       "watch_costs": true,           false: the cost curve is not corrected by the times of served
                                      steps, and equal traffic gives equal budgets (watch.py)
       "profile": {...},              cost curve, written by `vllm-echo profile` (cost.py)
       "calibration": {...}}}         acceptance, written by `vllm-echo calibrate` (acceptance.py)

A gate at depth d judges the layer drafted *from* depth d, that is the nodes of depth d + 1. Its
confidence c is the probability of the most likely path to that layer, exp(max score); the request
passes when c > threshold, otherwise it is truncated there. Left out, gates stand at the root (0.2)
and at target_depth (0.3); `"gates": []` means none. echo, dense and fixed-threshold ask gates; the
other policies have rules of their own (policies.py). Whoever writes gates and names no policy wants
them asked: the policy is then echo.

Depths that are left out shrink to what num_speculative_tokens allows. vLLM's own keys in VLLM_KEYS
keep their meaning. Nothing here imports vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm_echo.core.acceptance import KINDS, Calibration
from vllm_echo.core.checks import (
    check_int,
    check_probability,
    check_type,
    did_you_mean,
    is_int,
    show,
    unknown_key,
)
from vllm_echo.core.config_file import METHOD, is_echo_request, parse_speculative_config
from vllm_echo.core.cost import CostCurve
from vllm_echo.errors import EchoConfigError

__all__ = [
    "METHOD",
    "POLICIES",
    "EchoConfig",
    "Gate",
    "is_echo_request",
    "parse_speculative_config",
]

POLICIES = ("echo", "goodput", "dense", "fixed-threshold", "static", "ddd", "chain")
AUTO = "auto"

DEFAULT_NUM_SPECULATIVE_TOKENS = 8
DEFAULT_MAX_DEPTH = 6
DEFAULT_TARGET_DEPTH = 4
DEFAULT_TOP_K = 3
DEFAULT_THRESHOLD = 0.3
DEFAULT_ROOT_THRESHOLD = 0.2
DEFAULT_TARGET_THRESHOLD = 0.3

MAX_NODES_PER_REQUEST = 255  # node indices of one request fit a byte
MAX_NODES_PER_STEP = 2**31 - 1  # packed tables are int32

# vLLM's own keys of a speculative configuration that keep their meaning under echo.
VLLM_KEYS: dict[str, type] = {
    "draft_tensor_parallel_size": int,
    "max_model_len": int,
    "quantization": str,
    "revision": str,
    "code_revision": str,
    "enforce_eager": bool,
}
# Put in by vLLM itself between reading the configuration and building its object.
ENGINE_KEYS = ("target_model_config", "target_parallel_config")
TOP_LEVEL_KEYS = ("method", "model", "num_speculative_tokens", "echo")
# vLLM's keys that belong to other methods, or that echo decides itself.
# fmt: off
FOREIGN_KEYS = frozenset({
    "attention_backend", "disable_eagle_block_drop", "disable_padded_drafter_batch",
    "draft_load_config", "draft_sample_method", "dspark_draft_topk",
    "enable_adaptive_verification", "index_share_for_mtp_iteration", "kv_cache_dtype",
    "moe_backend", "num_speculative_tokens_per_batch_size", "parallel_drafting",
    "prompt_lookup_max", "prompt_lookup_min", "rejection_sample_method",
    "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
    "suffix_decoding_max_tree_depth", "suffix_decoding_min_token_prob",
    "synthetic_acceptance_length", "synthetic_acceptance_rates", "tensor_parallel_size",
    "use_heterogeneous_vocab", "use_local_argmax_reduction",
})
# fmt: on


@dataclass(frozen=True)
class Gate:
    """Go deeper than `depth` only when the layer drafted from it has confidence > `threshold`."""

    depth: int
    threshold: float


DEFAULT_GATES = (
    Gate(0, DEFAULT_ROOT_THRESHOLD),
    Gate(DEFAULT_TARGET_DEPTH, DEFAULT_TARGET_THRESHOLD),
)


@dataclass(frozen=True)
class EchoConfig:
    """The validated options; the module's docstring has their meaning.

    Worker processes receive `to_dict()` and rebuild it with `from_dict()`.
    """

    num_speculative_tokens: int = DEFAULT_NUM_SPECULATIVE_TOKENS
    policy: str = "goodput"
    k_max: int | str = AUTO
    max_depth: int = DEFAULT_MAX_DEPTH
    target_depth: int = DEFAULT_TARGET_DEPTH
    top_k: int = DEFAULT_TOP_K
    gates: tuple[Gate, ...] = DEFAULT_GATES
    threshold: float = DEFAULT_THRESHOLD
    transfer: bool = True
    width: bool = True
    watch_costs: bool = True
    profile: CostCurve | None = None
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise EchoConfigError(
                f"echo.policy: {show(self.policy)} is no policy"
                f"{did_you_mean(self.policy, POLICIES)}; choose one of {', '.join(POLICIES)}"
            )
        most = MAX_NODES_PER_REQUEST
        num_nodes = self.num_speculative_tokens
        check_int("num_speculative_tokens", num_nodes, 1, most, "nodes of one request in a step")
        if self.k_max != AUTO:
            meaning = f'nodes of a whole step, or "{AUTO}"'
            check_int("echo.k_max", self.k_max, 0, MAX_NODES_PER_STEP, meaning)
        check_int("echo.max_depth", self.max_depth, 1, most, "levels of a tree")
        check_int("echo.target_depth", self.target_depth, 1, most, "levels of a tree")
        check_int("echo.top_k", self.top_k, 1, most, "children of a node")
        check_probability("echo.threshold", self.threshold, "a number from 0 to 1")
        check_type("echo.transfer", self.transfer, bool, "true or false")
        check_type("echo.width", self.width, bool, "true or false")
        check_type("echo.watch_costs", self.watch_costs, bool, "true or false")
        self._check_depths()
        self._check_gates()
        self._check_calibration()

    @property
    def needs_profile(self) -> bool:
        """Does a decision depend on the cost curve?"""
        return self.k_max == AUTO or self.policy == "goodput"

    def _check_depths(self) -> None:
        num_nodes = self.num_speculative_tokens
        if self.max_depth > num_nodes:
            raise EchoConfigError(
                f"echo.max_depth: {self.max_depth} can never be reached with num_speculative_tokens"
                f" {num_nodes}, since every level takes a node; raise num_speculative_tokens to "
                f"{self.max_depth}, or lower echo.max_depth to {num_nodes}"
            )
        if self.target_depth > self.max_depth:
            raise EchoConfigError(
                f"echo.target_depth: {self.target_depth} lies beyond echo.max_depth "
                f"{self.max_depth}; raise echo.max_depth to {self.target_depth}, or lower "
                f"echo.target_depth to {self.max_depth}"
            )

    def _check_calibration(self) -> None:
        """A budget is computed from what the head offers in trees that can be drawn."""
        if self.calibration is None or not self.needs_profile:
            return
        name = "target_depth" if self.policy in ("static", "chain") else "max_depth"
        for kind, model in zip(KINDS, self.calibration.models(), strict=True):
            least = min(point.depth for point in model.supply)
            if least > getattr(self, name):
                raise EchoConfigError(
                    f"echo.calibration.{kind}.supply: knows trees of depth {least} and more, and "
                    f"echo.{name} is {getattr(self, name)}; calibrate again with these options"
                )

    def _check_gates(self) -> None:
        index_at: dict[int, int] = {}
        for index, gate in enumerate(self.gates):
            path = f"echo.gates[{index}]"
            check_int(f"{path}.depth", gate.depth, 0, None, "0 is the root")
            if gate.depth > self.max_depth:
                raise EchoConfigError(
                    f"{path}.depth: {gate.depth} lies beyond echo.max_depth {self.max_depth}; "
                    f"give a depth from 0 to {self.max_depth}, or raise echo.max_depth"
                )
            check_probability(
                f"{path}.threshold", gate.threshold, "a number from 0 to 1 (a path's probability)"
            )
            if gate.depth in index_at:
                raise EchoConfigError(
                    f"{path}.depth: {gate.depth} has a gate already, "
                    f"echo.gates[{index_at[gate.depth]}]; keep one gate for a depth"
                )
            index_at[gate.depth] = index

    @classmethod
    def from_speculative_config(cls, raw: Mapping[str, Any]) -> "EchoConfig":
        """Validate a whole speculative configuration whose method is echo."""
        raw = normalise_keys(raw)
        _check_top_level(raw)
        options = raw.get("echo")
        if options is None:
            options = {}
        check_type("echo", options, Mapping, 'an object such as {"k_max": "auto"}')
        options = normalise_keys(options, "echo.")
        names = [f.name for f in fields(cls) if f.name != "num_speculative_tokens"]
        for key in options:
            if key in TOP_LEVEL_KEYS or key in VLLM_KEYS:
                raise EchoConfigError(
                    f'echo.{key}: stands too deep; put "{key}" beside "echo", not into it'
                )
            if key not in names:
                raise unknown_key(f"echo.{key}", key, names)
        return cls._with_defaults(
            {**options, "num_speculative_tokens": raw.get("num_speculative_tokens")}
        )

    @classmethod
    def _with_defaults(cls, given: Mapping[str, Any]) -> "EchoConfig":
        """Fill in what is missing or null; depths follow the values they depend on."""
        values = {key: value for key, value in given.items() if value is not None}
        num_nodes = values.get("num_speculative_tokens", DEFAULT_NUM_SPECULATIVE_TOKENS)
        values.setdefault("policy", default_policy(values))
        max_depth = values.setdefault("max_depth", _at_most(DEFAULT_MAX_DEPTH, num_nodes))
        target_depth = values.setdefault("target_depth", _at_most(DEFAULT_TARGET_DEPTH, max_depth))
        if "gates" in values:
            values["gates"] = _read_gates(values["gates"])
        else:
            values["gates"] = (
                Gate(0, DEFAULT_ROOT_THRESHOLD),
                Gate(target_depth, DEFAULT_TARGET_THRESHOLD),
            )
        if "profile" in values:
            values["profile"] = CostCurve.from_dict(values["profile"], "echo.profile")
        if "calibration" in values:
            path = "echo.calibration"
            values["calibration"] = Calibration.from_dict(values["calibration"], path)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for worker processes and for printing."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["gates"] = [{"depth": g.depth, "threshold": g.threshold} for g in self.gates]
        for name in ("profile", "calibration"):
            values[name] = values[name].to_dict() if values[name] is not None else None
        return values

    def __str__(self) -> str:
        """For the log, on one line: of the long parts, whether they are there."""
        values = self.to_dict()
        for name in ("profile", "calibration"):
            values[name] = "none" if values[name] is None else "given"
        return ", ".join(f"{name} {show(value)}" for name, value in values.items())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EchoConfig":
        """The inverse of `to_dict`; validates again."""
        names = [f.name for f in fields(cls)]
        for key in values:
            if key not in names:
                raise unknown_key(f"echo.{key}", key, names)
        return cls._with_defaults(values)


def default_policy(options: Mapping[str, Any]) -> str:
    """The policy of echo options that name none. `goodput` was ahead of `echo` or within the noise
    of it (docs/measurements.md) and needs no thresholds; gates that somebody wrote are asked."""
    return "goodput" if options.get("gates") is None else "echo"


def normalise_keys(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Accept `k-max` for `k_max`, as vLLM does for its own keys, but not both."""
    result: dict[str, Any] = {}
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        if name in result:
            raise EchoConfigError(
                f"{prefix}{name}: is given twice, once written with '-'; keep one of them"
            )
        result[name] = value
    return result


def _check_top_level(raw: Mapping[str, Any]) -> None:
    known = (*TOP_LEVEL_KEYS, *VLLM_KEYS)
    nested = [f.name for f in fields(EchoConfig)]
    for key in raw:
        if key in FOREIGN_KEYS:
            raise EchoConfigError(
                f'{key}: does not go with "method": "echo" (it belongs to another speculative '
                "method, or echo decides it itself); remove it"
            )
        if key in nested and key not in known:
            raise EchoConfigError(
                f'{key}: stands at the top level; move it into "echo": {{"{key}": ...}}'
            )
        if key not in known and key not in ENGINE_KEYS:
            raise unknown_key(key, key, known)
    if not is_echo_request(raw):
        raise EchoConfigError(
            f'method: is {show(raw.get("method"))}, but the key "echo" is only for "method": '
            f'"{METHOD}"; set the method, or remove the key "echo"'
        )
    if raw.get("model") is None:
        raise EchoConfigError(
            "model: is missing; echo drafts with an EAGLE-3 head made for the served model: give "
            "its folder or its name on the model hub"
        )
    check_type("model", raw["model"], str, "the folder of an EAGLE-3 head or its name on a hub")
    if not raw["model"].strip():
        raise EchoConfigError("model: is empty; give the folder of an EAGLE-3 head or its hub name")
    _check_vllm_keys(raw)


def _check_vllm_keys(raw: Mapping[str, Any]) -> None:
    for key, expected in VLLM_KEYS.items():
        value = raw.get(key)
        if value is None:
            continue
        if expected is int:
            check_int(key, value, 1, None, "vLLM's own option")
        else:
            check_type(key, value, expected, "true or false" if expected is bool else "a text")


def _read_gates(value: Any) -> tuple[Gate, ...]:
    example = '{"depth": 0, "threshold": 0.2}'
    check_type("echo.gates", value, (list, tuple), f"a list such as [{example}]")
    names = [f.name for f in fields(Gate)]
    gates = []
    for index, entry in enumerate(value):
        path = f"echo.gates[{index}]"
        check_type(path, entry, Mapping, f"an object such as {example}")
        for key in entry:
            if key not in names:
                raise unknown_key(f"{path}.{key}", str(key), names)
        for name in names:
            if name not in entry:
                raise EchoConfigError(f"{path}.{name}: is missing; write a gate as {example}")
        gates.append(Gate(entry["depth"], entry["threshold"]))
    return tuple(gates)


def _at_most(default: int, limit: Any) -> Any:
    """The default, shrunk to a sensible limit; a senseless limit is refused elsewhere."""
    return min(default, limit) if is_int(limit) and limit > 0 else default
