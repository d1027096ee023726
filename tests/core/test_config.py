# SPDX-License-Identifier: Apache-2.0
"""What a correct configuration means: defaults, adaption, round trips, passing through."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.measured import CALIBRATION, PROFILE
from vllm_echo.core.acceptance import Calibration
from vllm_echo.core.config import POLICIES, EchoConfig, Gate, parse_speculative_config
from vllm_echo.core.cost import CostCurve

BASE: dict[str, Any] = {"method": "echo", "model": "head"}


def read(options: dict[str, Any] | None = None, **top: Any) -> EchoConfig:
    return EchoConfig.from_speculative_config(BASE | {"echo": options} | top)


def test_everything_but_the_model_has_a_default() -> None:
    config = EchoConfig.from_speculative_config(BASE)
    assert config == EchoConfig()
    assert config == EchoConfig(
        num_speculative_tokens=8,
        policy="goodput",
        k_max="auto",
        max_depth=6,
        target_depth=4,
        top_k=3,
        gates=(Gate(0, 0.2), Gate(4, 0.3)),
        threshold=0.3,
        transfer=True,
        width=True,
        watch_costs=True,
        profile=None,
        calibration=None,
    )


def test_null_is_the_default() -> None:
    assert read({"k_max": None, "gates": None}, num_speculative_tokens=None) == EchoConfig()


def test_gates_that_are_written_are_asked() -> None:
    """Catches a default policy under which they would silently mean nothing."""
    gates = [{"depth": 0, "threshold": 0.5}]
    assert read({"gates": gates}).policy == "echo"
    assert read({"gates": []}).policy == "echo"
    assert read({"gates": gates, "policy": None}).policy == "echo"
    assert read({"gates": gates, "policy": "goodput"}).policy == "goodput"


def test_a_line_of_the_log_has_every_option_and_no_long_one() -> None:
    config = EchoConfig(
        profile=CostCurve.from_dict(PROFILE, "profile"),
        calibration=Calibration.from_dict(CALIBRATION, "calibration"),
    )
    text = str(config)
    assert all(f"{name} " in text for name in config.to_dict())
    assert '"auto"' in text and 'profile "given"' in text and 'calibration "given"' in text
    assert 'profile "none"' in str(EchoConfig())
    assert len(text) < 400 and "\n" not in text


@pytest.mark.parametrize(
    ("num_nodes", "max_depth", "target_depth"), [(1, 1, 1), (5, 5, 4), (60, 6, 4)]
)
def test_depths_that_are_left_out_follow_the_nodes(
    num_nodes: int, max_depth: int, target_depth: int
) -> None:
    config = read(num_speculative_tokens=num_nodes)
    assert (config.max_depth, config.target_depth) == (max_depth, target_depth)


def test_the_default_gate_follows_target_depth() -> None:
    assert read({"target_depth": 2}).gates == (Gate(0, 0.2), Gate(2, 0.3))
    assert read({"gates": []}).gates == ()


def test_the_edges_are_allowed() -> None:
    gates = [{"depth": 0, "threshold": 0}, {"depth": 255, "threshold": 1}]
    config = read({"max_depth": 255, "k_max": 1, "gates": gates}, num_speculative_tokens=255)
    assert config.gates == (Gate(0, 0), Gate(255, 1))
    assert (read({"threshold": 0}).threshold, read({"threshold": 1}).threshold) == (0, 1)


def test_k_max_may_be_nothing_everything_and_auto() -> None:
    """0 turns drafting off without another engine; "auto" is no number of nodes."""
    assert [read({"k_max": k_max}).k_max for k_max in (0, 2**31 - 1, "auto")] == [
        0,
        2**31 - 1,
        "auto",
    ]


def test_hyphens_are_read_as_vllm_reads_them() -> None:
    config = EchoConfig.from_speculative_config(
        {"method": "echo", "model": "x", "num-speculative-tokens": 9, "echo": {"k-max": 5}}
    )
    assert (config.num_speculative_tokens, config.k_max) == (9, 5)


def test_vllms_own_keys_may_stand_beside() -> None:
    top = {"draft_tensor_parallel_size": 1, "revision": "main", "enforce_eager": True}
    assert read(**top) == EchoConfig()


@st.composite
def configs(draw: st.DrawFn) -> EchoConfig:
    num_nodes = draw(st.integers(1, 255))
    max_depth = draw(st.integers(1, num_nodes))
    depths = draw(st.lists(st.integers(0, max_depth), unique=True, max_size=8))
    threshold = st.floats(0, 1)
    return EchoConfig(
        num_speculative_tokens=num_nodes,
        policy=draw(st.sampled_from(POLICIES)),
        k_max=draw(st.integers(0, 2**31 - 1) | st.just("auto")),
        max_depth=max_depth,
        target_depth=draw(st.integers(1, max_depth)),
        top_k=draw(st.integers(1, 255)),
        gates=tuple(Gate(depth, draw(threshold)) for depth in depths),
        threshold=draw(threshold),
        transfer=draw(st.booleans()),
        width=draw(st.booleans()),
        profile=draw(st.none() | st.just(CostCurve.from_dict(PROFILE, "profile"))),
        calibration=draw(st.none() | st.just(Calibration.from_dict(CALIBRATION, "calibration"))),
    )


@settings(deadline=None)
@given(configs())
def test_a_worker_process_rebuilds_the_same_configuration(config: EchoConfig) -> None:
    assert EchoConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_inline_file_and_dict_are_the_same(tmp_path: Path) -> None:
    text = json.dumps(BASE | {"echo": {"k_max": 5}})
    path = tmp_path / "echo.json"
    path.write_text("\ufeff" + text + "\n", encoding="utf-8")
    expected = json.loads(text)
    assert parse_speculative_config(text) == expected
    assert parse_speculative_config(f"  {text}") == expected
    assert parse_speculative_config(str(path)) == expected
    assert parse_speculative_config(expected) == expected


def test_other_methods_keep_jsons_rule_for_duplicates() -> None:
    text = '{"method": "ngram", "method": "ngram", "num_speculative_tokens": 2}'
    assert parse_speculative_config(text) == json.loads(text)


def test_the_readmes_example_spells_out_the_defaults() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    example = re.search(r'^ {4}\{"method": "echo",\n.*?\n\n', readme, flags=re.M | re.S)
    assert example is not None
    assert EchoConfig.from_speculative_config(json.loads(example[0])) == EchoConfig()
