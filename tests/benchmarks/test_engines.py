# SPDX-License-Identifier: Apache-2.0
"""Which engines there are, on which servers."""

import pytest

from benchmarks.serving.engines import (
    ABLATIONS,
    POLICIES,
    build_lineup,
    label,
    needs_quiet_start,
    read_config,
)
from benchmarks.serving.errors import BenchmarkError
from tests.benchmarks.kit import ECHO_CONFIG
from vllm_echo.core import config

WITH_PROFILE = {**ECHO_CONFIG, "echo": {"policy": "goodput", "profile": {"step": [[1, 2.0]]}}}


def names(lineup) -> list[str]:
    return [engine.name for engine in lineup.engines]


def test_every_policy_of_the_project_is_an_engine():
    assert set(POLICIES) == set(config.POLICIES)
    assert {*POLICIES, *ABLATIONS} <= set(names(build_lineup(WITH_PROFILE)))


def test_policies_share_one_server():
    lineup = build_lineup(WITH_PROFILE)
    shared = [engine for engine in lineup.engines if engine.server == "echo"]
    assert len(shared) == len(POLICIES) + len(ABLATIONS)
    assert len(lineup.servers) == 9
    assert lineup.servers["none"] is lineup.servers["none-sync"] is None


def test_goodput_needs_a_profile():
    lineup = build_lineup(ECHO_CONFIG)
    assert "goodput" not in names(lineup)
    with pytest.raises(BenchmarkError, match="profile"):
        lineup.select(["goodput"])
    assert "goodput" in names(build_lineup({**ECHO_CONFIG, "echo": {"k_max": "auto"}}))


@pytest.mark.parametrize(
    ("options", "quiet"),
    [
        (None, True),
        ({}, True),
        ({"k_max": 0, "gates": []}, False),
        ({"k_max": None, "policy": "echo"}, True),
        ({"k_max": 8, "policy": "echo"}, False),
        ({"k_max": "auto"}, True),
        ({"k_max": "auto", "profile": {"step": [[1, 2.0]]}}, False),
        ({"policy": "goodput", "profile": None}, True),
    ],
)
def test_a_start_that_measures_the_machine_is_known(options, quiet):
    assert needs_quiet_start({"method": "echo", "echo": options}) == quiet
    assert not needs_quiet_start(None)


@pytest.mark.parametrize(
    ("config", "default"),
    [(ECHO_CONFIG, "echo"), (WITH_PROFILE, "goodput"), ({**ECHO_CONFIG, "echo": None}, "goodput")],
)
def test_the_default_is_the_configuration_as_given(config, default):
    lineup = build_lineup(config)
    assert lineup.default == default
    assert names(lineup.select(["default"])) == ["none", "none-sync", default]


@pytest.mark.parametrize("chosen", [["none"], ["none-sync"], ["echo"]])
def test_both_settings_of_plain_decoding_are_in_every_selection(chosen):
    """Catches a comparison with the slower one alone."""
    assert names(build_lineup(ECHO_CONFIG).select(chosen))[:2] == ["none", "none-sync"]


def test_select_keeps_the_order_and_only_servers_that_are_used():
    lineup = build_lineup(ECHO_CONFIG).select(["echo", "eagle3"])
    expected = ["none", "none-sync", *(f"eagle3-{k}" for k in range(1, 6)), "echo"]
    assert names(lineup) == list(lineup.servers) == expected
    assert names(build_lineup(ECHO_CONFIG).select(["all"])) == names(build_lineup(ECHO_CONFIG))


def test_a_wrong_engine_is_refused_with_the_choices():
    with pytest.raises(BenchmarkError, match="choose from none, none-sync, eagle3-1"):
        build_lineup(ECHO_CONFIG).select(["eagle"])


def test_further_configurations_of_vllm():
    lineup = build_lineup(ECHO_CONFIG, {"mine": {"method": "ngram"}}).select(["mine"])
    assert lineup.servers == {"none": None, "none-sync": None, "mine": {"method": "ngram"}}
    with pytest.raises(BenchmarkError, match="another name"):
        build_lineup(ECHO_CONFIG, {"echo": {"method": "ngram"}})


def test_labels():
    assert label("none") == "no speculation"
    assert label("none-sync") == "no speculation, --no-async-scheduling"
    assert label("eagle3-4") == "vLLM eagle3, K = 4"
    assert label("echo", default="echo") == "echo (default)"


@pytest.mark.parametrize("text", ["{", '{"method": "eagle3", "model": "m"}', "/no/such/file"])
def test_a_wrong_configuration_is_one_line(text):
    with pytest.raises(BenchmarkError, match="--speculative-config") as error:
        read_config(text)
    assert "\n" not in str(error.value)
