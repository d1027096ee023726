# SPDX-License-Identifier: Apache-2.0
"""Measures a head as a chain of drafts in stock vLLM: accepted length on question files.

The accepted length is the mean number of tokens that one verification step yields, the bonus token
included: 1 + accepted draft tokens / drafts. It is read from vLLM's own counters.
"""

from __future__ import annotations

import argparse
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def first_question(row: dict[str, Any]) -> str:
    """The user's first turn in any of the known formats."""
    if "turns" in row:
        return row["turns"][0]
    for key in ("prompt", "question", "text", "instruction"):
        if key in row:
            return row[key]
    raise ValueError(f"no question among the keys {sorted(row)}")


def first_questions(path: Path, limit: int) -> list[str]:
    """At most ``limit`` questions from the start of a jsonl file."""
    with path.open(encoding="utf-8") as lines:
        return [first_question(json.loads(line)) for line in islice(lines, limit)]


def draft_vocabulary(head: Path) -> set[int]:
    """Target ids of the tokens that a head can draft."""
    offsets = load_file(head / "model.safetensors")["d2t"]
    return set((offsets + torch.arange(len(offsets))).tolist())


class Counters:
    """vLLM's counters of speculative decoding, read as differences."""

    NAMES = {
        "vllm:spec_decode_num_drafts": "drafts",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
        "vllm:spec_decode_num_accepted_tokens_per_pos": "by_position",
    }

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.last = self._read()

    def _read(self) -> dict[str, list[int]]:
        values: dict[str, list[int]] = {}
        for metric in self.llm.get_metrics():
            if metric.name in self.NAMES:
                value = metric.values if hasattr(metric, "values") else [metric.value]
                values[self.NAMES[metric.name]] = list(value)
        return values

    def since_last(self) -> dict[str, list[int]]:
        """What was counted since the last call."""
        now = self._read()
        gained = {
            name: [a - b for a, b in zip(now[name], self.last.get(name, [0] * 99), strict=False)]
            for name in now
        }
        self.last = now
        return gained


def record(head: Path, results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Adds the results to the head's provenance.json."""
    path = head / "provenance.json"
    provenance = json.loads(path.read_text(encoding="utf-8"))
    provenance["accepted_length"] = {
        "how": f"stock vLLM {version_of_vllm()}, eagle3 chain of {args.drafts}, greedy, bfloat16, "
        f"at most {args.max_tokens} answer tokens, bonus token included",
        "results": results,
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def version_of_vllm() -> str:
    """Version of the installed vLLM, whichever distribution it came with."""
    import vllm

    return vllm.__version__


def main() -> None:
    """Command line; see README.md. Prints one JSON line per file."""
    parser = argparse.ArgumentParser(description="accepted length of a head in stock vLLM")
    parser.add_argument("--model", type=Path, required=True, help="folder of the target model")
    parser.add_argument("--head", type=Path, required=True, help="folder of the head")
    parser.add_argument("files", type=Path, nargs="+", help="question files (jsonl)")
    parser.add_argument("--drafts", type=int, default=4, help="length of the drafted chain")
    parser.add_argument("--limit", type=int, default=40, help="questions per file")
    parser.add_argument("--max-tokens", type=int, default=256, help="answer tokens per question")
    parser.add_argument("--batch", type=int, default=16, help="requests served together")
    parser.add_argument("--record", action="store_true", help="write to the head's provenance")
    args = parser.parse_args()

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(args.model),
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=args.batch,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": str(args.head),
            "num_speculative_tokens": args.drafts,
        },
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    counters = Counters(llm)
    draftable = draft_vocabulary(args.head)
    results = []
    for path in args.files:
        chats = [
            [{"role": "user", "content": question}]
            for question in first_questions(path, args.limit)
        ]
        outputs = llm.chat(chats, sampling, use_tqdm=False)
        gained = counters.since_last()
        drafts = gained["drafts"][0]
        tokens = [token for output in outputs for token in output.outputs[0].token_ids]
        result = {
            "file": path.name,
            "questions": len(chats),
            "answer_tokens": len(tokens),
            "in_draft_vocabulary": round(sum(t in draftable for t in tokens) / len(tokens), 4),
            "drafts": drafts,
            "accepted_length": round(1 + gained["accepted"][0] / drafts, 3),
            "accepted_by_position": [round(n / drafts, 4) for n in gained["by_position"]],
        }
        print(json.dumps(result), flush=True)
        results.append(result)
    mean = sum(result["accepted_length"] for result in results) / len(results)
    print(json.dumps({"mean_accepted_length": round(mean, 3)}))
    if args.record:
        record(args.head, results, args)


if __name__ == "__main__":
    main()
