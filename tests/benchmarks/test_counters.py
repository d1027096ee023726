# SPDX-License-Identifier: Apache-2.0
"""What is read from a server and from /proc."""

import json
import os
import time

import pytest

from benchmarks.serving import counters

PAGE = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0
vllm:iteration_tokens_total_bucket{engine="0",le="8.0"} 12.0
vllm:iteration_tokens_total_count{engine="0"} 12.0
vllm:num_preemptions_total{engine="0"} 1.0
vllm:spec_decode_echo_num_nodes_drafted_total{depth="1",engine="0"} 30.0
vllm:spec_decode_echo_num_nodes_drafted_total{depth="2",engine="0"} 12.0
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
process_cpu_seconds_total 9.63
"""


def test_metrics():
    assert counters.parse_metrics(PAGE) == {
        "drafts": 10.0,
        "drafted": 40.0,
        "accepted": 15.0,
        "steps": 12.0,
        "preemptions": 1.0,
        "echo_num_nodes_drafted": 42.0,
    }


def test_requests_that_are_not_finished():
    assert counters.unfinished_requests(PAGE) == 5.0
    assert counters.unfinished_requests("") == 0.0


def test_differences_between_two_moments():
    zero = counters.parse_metrics("")
    now = counters.parse_metrics(PAGE)
    assert counters.drafting(zero, now)["accepted_length"] == 2.5
    assert counters.drafting(zero, now)["echo_num_nodes_drafted"] == 42.0
    assert counters.drafting(now, now)["accepted_length"] is None
    assert counters.drafting(now, now)["drafted"] == 0.0


def test_stage_times_per_step(tmp_path):
    path = tmp_path / "stages.json"
    assert counters.read_stages(path) is None
    path.write_text(json.dumps({"steps": 20, "seconds": {"verify": 0.2}, "counts": {"nodes": 40}}))
    before = counters.read_stages(path)
    after = {"steps": 40, "seconds": {"verify": 0.3, "draft": 0.1}, "counts": {"nodes": 100}}
    difference = counters.stage_difference(before, after)
    assert difference == {
        "steps": 20,
        "milliseconds_per_step": {"verify": pytest.approx(5), "draft": pytest.approx(5)},
        "per_step": {"nodes": 3},
    }
    assert counters.stage_difference(None, before)["milliseconds_per_step"] == {"verify": 10}
    assert counters.stage_difference(before, before) is None
    assert counters.stage_difference(None, None) is None


def test_processes_and_what_they_use():
    assert os.getpid() in counters.members(os.getpgid(0))
    before = counters.processor_seconds([os.getpid()])
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert counters.processor_seconds([os.getpid()]) - before >= 0.05
    assert counters.processor_seconds([2**22 + 1]) == 0
    assert counters.proportional_memory([os.getpid()]) > 2**20
    assert counters.busy_seconds() > 0
