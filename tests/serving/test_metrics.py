# SPDX-License-Identifier: Apache-2.0
"""Echo's metrics agree with vLLM's own and with what verification did, stay finite where nothing
is drafted, and exist only where echo speculates."""

import json
import logging
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from vllm import SamplingParams
from vllm.v1.metrics.loggers import LoggingStatLogger

from tests.heard import heard
from tests.serving.harness import Engine, echo_engine, plain_engine, random_prompts, truths_of
from tests.serving.scrape import ECHO, VLLM, Metrics, scrape
from tests.serving.test_server import free_port, wait_until_up
from vllm_echo.core.config import EchoConfig
from vllm_echo.integration.metrics import gates_asked

NUM_NODES = 8


def observed_engine(target: Path, head: Path, **options) -> Engine:
    return echo_engine(target, head, NUM_NODES, disable_log_stats=False, **options)


def mixed_params(count: int) -> list[SamplingParams]:
    kinds = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"temperature": 0, "min_tokens": 6},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0, "max_tokens": 1},
    ]
    return [
        SamplingParams(**{"max_tokens": 8 + i, "ignore_eos": i % 2 == 0, **kinds[i % len(kinds)]})
        for i in range(count)
    ]


def count_steps(engine: Engine) -> list[int]:
    """A list that grows by one with every step."""
    steps: list[int] = []
    propose = engine.runner.propose_draft_token_ids

    def counted(*args, **kwargs):
        steps.append(1)
        return propose(*args, **kwargs)

    engine.runner.propose_draft_token_ids = counted
    return steps


def test_totals_agree_with_vllm_and_with_the_verifier(
    plain: Engine, target: Path, head: Path
) -> None:
    prompts, params = random_prompts(30, seed=51), mixed_params(30)
    truths = truths_of(plain.generate(prompts, params))
    echo = observed_engine(target, head, max_num_batched_tokens=128)
    at_start = scrape()
    assert at_start.total(f"{ECHO}num_nodes_drafted_total") == 0, "shown before anything happens"
    assert at_start.labels == {
        frozenset({"engine", "model_name", *more})
        for more in ((), ("depth",), ("gate",), ("le",), ("reason",))
    }
    echo.follow(truths)
    steps = count_steps(echo)
    echo.generate(prompts, params)
    metrics = scrape()
    metrics.require_consistency()
    echo.record.require_tree_acceptance()
    assert sum(metrics.nodes("verified").values()) == echo.record.drafted
    assert sum(metrics.nodes("accepted").values()) == echo.record.accepted
    assert metrics.steps("with") + metrics.steps("without") == len(steps)
    assert metrics.steps("with") > 0 < metrics.steps("without"), "prefill was to draft nothing"
    assert metrics.left_out().keys() == {"prefill", "last_token"}
    assert metrics.budget("offered") == 32 * metrics.steps("with")
    passed, cut = (
        metrics.by(f"{ECHO}num_gate_{kind}_total", "gate") for kind in ("passes", "truncations")
    )
    assert passed and cut and set(passed) | set(cut) <= {0, 4}


def test_budget_moves_only_where_it_may(plain: Engine, target: Path, head: Path) -> None:
    prompts, params = random_prompts(12, seed=52), mixed_params(12)
    echo = observed_engine(target, head, echo={"k_max": 16})
    echo.follow(truths_of(plain.generate(prompts, params)))
    echo.runner.set_options({"transfer": False})
    echo.generate(prompts, params)
    assert scrape().budget("used") > 0 == scrape().budget("moved")
    echo.runner.set_options({"transfer": True})
    echo.generate(prompts, params)
    assert scrape().budget("moved") > 0
    scrape().require_consistency()


def test_a_recorded_trace_is_not_counted_as_drafting(target: Path, head: Path) -> None:
    """Its budget has no bound, and nothing of it is verified."""
    echo = observed_engine(target, head)
    echo.runner.start_recording()
    echo.generate(random_prompts(2, seed=53), SamplingParams(max_tokens=6, ignore_eos=True))
    assert echo.runner.take_recording()
    metrics = scrape()
    assert metrics.budget("offered") == 0 == metrics.steps("with") < metrics.steps("without")


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """What vLLM's stat loggers write."""
    with heard("vllm.v1.metrics.loggers", logging.INFO) as lines:
        yield lines


def echo_lines(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("ECHO metrics: ")]


def test_the_periodic_log_says_the_same(
    plain: Engine, target: Path, head: Path, log_lines: list[str]
) -> None:
    prompts, params = random_prompts(6, seed=54), mixed_params(6)
    truths = truths_of(plain.generate(prompts, params))
    echo = observed_engine(target, head)
    echo.follow(truths)
    vllm_logger = LoggingStatLogger(echo.llm.llm_engine.vllm_config)
    echo.llm.llm_engine.logger_manager.stat_loggers.append(vllm_logger)
    vllm_logger.log()
    assert echo_lines(log_lines) == [], "an interval without steps"
    echo.generate(prompts, params)
    vllm_logger.log()
    (line,) = echo_lines(log_lines)
    metrics = scrape()
    assert f"Steps: {metrics.steps('with'):.0f} with drafts, " in line
    assert f"{metrics.budget('offered'):.0f} offered, {metrics.budget('used'):.0f} used" in line
    first = "/".join(
        f"{metrics.nodes(kind)[1]:.0f}" for kind in ("drafted", "verified", "accepted")
    )
    assert f"by depth: 1: {first}, 2: " in line
    drafts = metrics.total(f"{ECHO}accepted_length_count")
    length = metrics.total(f"{ECHO}accepted_length_sum") / drafts
    assert f"Mean accepted length: {length:.2f}" in line
    vllm_logger.log()
    assert len(echo_lines(log_lines)) == 1


def test_an_interval_without_drafts_is_finite(
    target: Path, head: Path, log_lines: list[str]
) -> None:
    echo = observed_engine(target, head, echo={"k_max": 0})
    vllm_logger = LoggingStatLogger(echo.llm.llm_engine.vllm_config)
    echo.llm.llm_engine.logger_manager.stat_loggers.append(vllm_logger)
    steps = count_steps(echo)
    echo.generate(random_prompts(3, seed=55), SamplingParams(max_tokens=9, ignore_eos=True))
    vllm_logger.log()
    metrics = scrape()
    left_out = metrics.left_out()
    assert left_out == {"no_budget": left_out["no_budget"], "last_token": 3}
    assert left_out["no_budget"] > len(steps)
    assert echo_lines(log_lines) == [
        f"ECHO metrics: Steps: 0 with drafts, {len(steps)} without, Requests without drafts by "
        f"reason: last_token: 3, no_budget: {left_out['no_budget']:.0f}"
    ]
    metrics.require_consistency()
    assert metrics.steps("without") == len(steps) > 0
    assert metrics.budget("offered") == 0


@pytest.mark.parametrize("method", ["none", "eagle3"])
def test_other_engines_show_no_echo_metric(
    target: Path, head: Path, method: str, log_lines: list[str]
) -> None:
    options: dict = {"disable_log_stats": False}
    if method == "eagle3":
        options["speculative_config"] = {
            "method": "eagle3",
            "model": str(head),
            "num_speculative_tokens": 2,
        }
    stock = plain_engine(target, **options)
    vllm_logger = LoggingStatLogger(stock.llm.llm_engine.vllm_config)
    stock.llm.llm_engine.logger_manager.stat_loggers.append(vllm_logger)
    stock.generate(random_prompts(2, seed=56), SamplingParams(max_tokens=9, ignore_eos=True))
    vllm_logger.log()
    assert scrape().names == (
        set()
        if method == "none"
        else {
            f"{VLLM}{name}_total"
            for name in (
                "num_drafts",
                "num_draft_tokens",
                "num_accepted_tokens",
                "num_accepted_tokens_per_pos",
            )
        }
    )
    assert log_lines and echo_lines(log_lines) == []


@pytest.mark.timeout(600)
def test_counts_cross_the_processes_of_a_server(target: Path, head: Path, tmp_path: Path) -> None:
    """Worker, engine core and front-end are three processes here."""
    port, log = free_port(), tmp_path / "log.txt"
    url = f"http://127.0.0.1:{port}"
    speculative = {
        "method": "echo",
        "model": str(head),
        "num_speculative_tokens": NUM_NODES,
        "echo": {"policy": "echo", "k_max": 32},
    }
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(target)]
    command += ["--speculative-config", json.dumps(speculative), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512"]
    command += ["--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"]
    command += ["--block-size", "32", "--kv-cache-memory-bytes", str(64 << 20)]
    hidden = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    environment["VLLM_LOG_STATS_INTERVAL"] = "1"
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until_up(f"{url}/health", server, log)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda seed: complete(url, seed, max_tokens=60), range(16)))
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
            metrics = Metrics(response.read().decode())
        deadline = time.monotonic() + 30
        while "ECHO metrics: " not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.5)
    finally:
        server.terminate()
        server.wait(60)
    metrics.require_consistency()
    assert sum(metrics.nodes("accepted").values()) > 0
    assert metrics.budget("on_depth") > 0 < metrics.budget("on_width")
    assert "ECHO metrics: Steps: " in log.read_text()
    assert "ECHO on the V1 CPU runner: num_speculative_tokens" in log.read_text()
    assert 'policy "echo", k_max 32' in log.read_text()


def complete(url: str, seed: int, **options) -> None:
    """One request so hot that the head's guesses are hit now and then."""
    body = {"model": "tiny", "prompt": [5 + seed, 6, 7], "seed": seed, "temperature": 2.0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps({**body, "ignore_eos": True, **options}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        assert json.load(response)["usage"]["completion_tokens"] == options["max_tokens"]


@pytest.mark.parametrize(
    ("policy", "gates"),
    [("echo", [0, 4]), ("dense", [0, 1, 2, 3, 4, 5]), ("goodput", []), ("static", []), ("ddd", [])],
)
@pytest.mark.parametrize("k_max", ["auto", 16])
def test_gates_have_counters_from_the_start(
    policy: str, gates: list[int], k_max: int | str
) -> None:
    """Also where the cost curve is still to be measured, which only the worker does."""
    assert gates_asked(EchoConfig(policy=policy, k_max=k_max)) == gates
