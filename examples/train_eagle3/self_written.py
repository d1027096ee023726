# SPDX-License-Identifier: Apache-2.0
"""Lets the target write user questions, as in Magpie (arXiv 2406.08464).

A chat model that is given nothing but the start of a user's turn writes what its training data had
there: a question. To get instructions of many kinds, half of the questions are begun with a word of
``OPENINGS``. Questions are sampled, filtered and kept without repetitions, one JSON object
with the key ``question`` a line, for ``generate.py --questions``. A second run goes on where the
first one stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import time
from pathlib import Path
from typing import Any

ROUND = 512  # questions asked for at a time
TEMPERATURES = (0.8, 1.0, 1.1)  # of the rounds, in turn
MAX_TOKENS = 160
OPENINGS = """
Analyze Answer Arrange Brainstorm Calculate Can Choose Classify Combine Come Compare
Compose Construct Convert Correct Create Decide Define Describe Design Determine Develop Discuss Do
Draft Edit Estimate Evaluate Explain Find For Formulate Generate Give Given How Identify If Imagine
In Is List Make Name Offer Outline Plan Predict Pretend Propose Provide Rank Read Recommend Rewrite
Select Solve Sort Suggest Summarize Tell Translate Turn Use What When Where Which Who Why Write
You
"""


def user_prefix(tokenizer: Any) -> list[int]:
    """Token ids of the chat template up to the place of the user's text."""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False)
    return tokenizer(chat.partition("\0")[0], add_special_tokens=False)["input_ids"]


def is_question(text: str) -> bool:
    """Whether a sampled text can serve as a user's turn."""
    words = text.lower().split()
    return (
        len(words) >= 3
        and len(text) >= 12
        and "<|" not in text
        and sum(char.isascii() for char in text) >= 0.95 * len(text)
        # A text that goes round in circles has few distinct words.
        and len(set(words)) >= 0.45 * len(words)
    )


def fingerprint(text: str) -> str:
    """Equal for texts that differ only late, in case or in punctuation."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower())[:70].strip()


def main() -> None:
    """Command line; see README.md."""
    parser = argparse.ArgumentParser(description="user questions written by the target")
    parser.add_argument("--model", type=Path, required=True, help="folder of the target model")
    parser.add_argument("--out", type=Path, required=True, help="jsonl file, appended to")
    parser.add_argument("--count", type=int, default=2000, help="questions to have in the end")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no round after this time")
    parser.add_argument("--batch", type=int, default=128, help="requests decoded together")
    args = parser.parse_args()

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    args.out.parent.mkdir(parents=True, exist_ok=True)
    known: set[str] = set()
    if args.out.exists():
        with args.out.open(encoding="utf-8") as lines:
            known = {fingerprint(json.loads(line)["question"]) for line in lines}
    deadline = time.monotonic() + 60 * args.minutes
    llm = LLM(
        model=str(args.model),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=args.batch,
        seed=len(known),
    )
    tokenizer = llm.get_tokenizer()
    prefix = user_prefix(tokenizer)
    openings = OPENINGS.split()
    opening_ids = {
        word: tokenizer(word, add_special_tokens=False)["input_ids"] if word else []
        for word in ["", *openings]
    }
    rounds = 0
    with args.out.open("a", encoding="utf-8") as file:
        rng = random.Random(len(known))
        while len(known) < args.count and time.monotonic() < deadline:
            temperature = TEMPERATURES[rounds % len(TEMPERATURES)]
            sampling = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS)
            starts = [rng.choice(openings) if i % 2 else "" for i in range(ROUND)]
            prompts = [{"prompt_token_ids": prefix + opening_ids[start]} for start in starts]
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            for start, output in zip(starts, outputs, strict=True):
                answer = output.outputs[0]
                text = (start + answer.text).strip()
                if answer.finish_reason != "stop" or not is_question(text):
                    continue
                if fingerprint(text) not in known:
                    known.add(fingerprint(text))
                    file.write(json.dumps({"question": text}) + "\n")
            file.flush()
            rounds += 1
            print(f"{len(known)} of {args.count} questions after {rounds} rounds", flush=True)


if __name__ == "__main__":
    main()
