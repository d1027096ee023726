# SPDX-License-Identifier: Apache-2.0
"""One engine, several concurrencies: tokens per second, accepted length, stage times.

Run by ``measure.py`` in a process of its own, so that engines never share anything."""

import argparse
import json
import os
import time
from pathlib import Path

from vllm_echo.timing import STAGE_TIMES_ENV

WARM_UP_REQUESTS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--speculative-config", type=json.loads, default=None)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, nargs="+", required=True)
    parser.add_argument("--requests-per-slot", type=int, default=4)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    llm = start_engine(args)
    prompts = chat_prompts(llm, args.prompts)
    results = {}
    run_concurrently(llm, prompts[:WARM_UP_REQUESTS], 2, 16)
    for concurrency in args.concurrency:
        count = max(args.requests_per_slot * concurrency, 8)
        chosen = [prompts[i % len(prompts)] for i in range(count)]
        results[str(concurrency)] = measure(llm, chosen, concurrency, args.output_tokens)
    args.output.write_text(json.dumps(results))


def start_engine(args: argparse.Namespace):
    """An engine as `vllm serve` would start it: its own core and worker processes."""
    from vllm import LLM

    return LLM(
        model=args.model,
        speculative_config=args.speculative_config,
        dtype=args.dtype,
        max_model_len=2048,
        max_num_seqs=max(args.concurrency),
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=False,
    )


def chat_prompts(llm, path: Path) -> list[list[int]]:
    """Token ids of every line's question, in the model's chat format."""
    tokenizer = llm.get_tokenizer()
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    questions = [question_of(line) for line in lines]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]


def question_of(line: dict) -> str:
    """The first of the fields that the usual question files have."""
    for key in ("prompt", "question", "turns", "text"):
        if key in line:
            return line[key][0] if isinstance(line[key], list) else line[key]
    raise ValueError(
        f"a prompt line needs one of prompt, question, turns, text; it has {sorted(line)}"
    )


def measure(llm, prompts: list[list[int]], concurrency: int, output_tokens: int) -> dict:
    """Wall time of answering ``prompts`` with ``concurrency`` of them at any time."""
    before, counters = stage_report(), spec_counters(llm)
    start = time.perf_counter()
    tokens = run_concurrently(llm, prompts, concurrency, output_tokens)
    seconds = time.perf_counter() - start
    after = spec_counters(llm)
    drafts = after["drafts"] - counters["drafts"]
    accepted = after["accepted"] - counters["accepted"]
    return {
        "output_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "accepted_length": 1 + accepted / drafts if drafts else None,
        "drafted": after["drafted"] - counters["drafted"],
        "stages": stage_difference(before, stage_report()),
    }


def run_concurrently(llm, prompts: list[list[int]], concurrency: int, output_tokens: int) -> int:
    """Keep ``concurrency`` requests running until all are answered; returns output tokens."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=output_tokens)
    waiting, running, tokens = list(enumerate(prompts)), 0, 0
    stamp = time.monotonic_ns()
    while waiting or running:
        while waiting and running < concurrency:
            index, prompt = waiting.pop(0)
            engine.add_request(f"{stamp}-{index}", {"prompt_token_ids": prompt}, params)
            running += 1
        for output in engine.step():
            if output.finished:
                running -= 1
                tokens += len(output.outputs[0].token_ids)
    return tokens


def spec_counters(llm) -> dict[str, float]:
    names = {
        "vllm:spec_decode_num_drafts": "drafts",
        "vllm:spec_decode_num_draft_tokens": "drafted",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
    }
    counters = dict.fromkeys(names.values(), 0.0)
    for metric in llm.get_metrics():
        if metric.name in names:
            counters[names[metric.name]] += metric.value
    return counters


def stage_report() -> dict | None:
    path = Path(os.environ.get(STAGE_TIMES_ENV, ""))
    return json.loads(path.read_text()) if path.is_file() else None


def stage_difference(before: dict | None, after: dict | None) -> dict | None:
    """Milliseconds per step and stage between two reports."""
    if before is None or after is None or after["steps"] == before["steps"]:
        return None
    steps = after["steps"] - before["steps"]
    per_step = {
        stage: 1000 * (total - before["seconds"].get(stage, 0.0)) / steps
        for stage, total in after["seconds"].items()
    }
    counts = {
        name: (total - before["counts"].get(name, 0.0)) / steps
        for name, total in after["counts"].items()
    }
    return {"steps": steps, "milliseconds_per_step": per_step, "per_step": counts}


if __name__ == "__main__":
    main()
