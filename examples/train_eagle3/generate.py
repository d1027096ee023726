# SPDX-License-Identifier: Apache-2.0
"""Lets the target model answer the training prompts, and stores the token ids.

The answers are what an EAGLE-3 head learns from: it has to foresee the target's own text. They are
greedy, but for the texts that later turns quote, which are sampled. vLLM runs in this process with
a queue that is kept full, so no batch waits for its slowest member. Each finished turn is appended
to a shard at once; a second run goes on where the first one stopped.

A record holds ``id`` (conversation key and turn number), ``source``, ``prompt_ids`` (the whole
chat so far, as the template renders it), ``answer_ids`` (with the end token if the answer ended)
and ``finish`` ("stop", "length", or "repetition" if the answer was ended for going in circles).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from capture import HiddenStateCapture
from hidden_states import CacheWriter, HiddenStateCache, long_enough
from prompts import TOKEN_SHARES, Conversation, quotation, training_conversations
from repetition import RepetitionWatch

MIN_QUOTED_TOKENS = 60  # a shorter text needs no summary


@dataclass
class Turn:
    """One request: a conversation, the turn to answer, and the chat up to and with its question."""

    conversation: Conversation
    number: int
    messages: list[dict[str, str]]
    watch: RepetitionWatch = field(default_factory=RepetitionWatch)
    watched: int = 0  # answer tokens that the watch has read

    @property
    def key(self) -> str:
        return f"{self.conversation.key}/{self.number}"

    @property
    def source(self) -> str:
        quotes = self.conversation.quoting and self.number > 0
        return "summary" if quotes else self.conversation.source


def read_records(folder: Path) -> Iterator[dict[str, Any]]:
    """All complete records of the shards in ``folder``; a torn last line is skipped."""
    for shard in sorted(folder.glob("shard-*.jsonl")):
        with shard.open(encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield json.loads(line)


class Generator:
    """Feeds turns to a vLLM engine and writes the answers to a shard."""

    def __init__(self, args: argparse.Namespace) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from transformers import AutoTokenizer
        from vllm import EngineArgs, LLMEngine, SamplingParams

        self.capture = HiddenStateCapture(tuple(args.aux_layers))
        self.capture.install()
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(args.model),
                dtype="bfloat16",
                max_model_len=args.max_prompt_tokens + args.max_answer_tokens,
                max_num_seqs=args.batch,
                max_num_batched_tokens=1024,
                enable_prefix_caching=False,  # a token that is not computed has no hidden state
                seed=args.seed,
                disable_log_stats=True,
            )
        )
        self.make_sampling = SamplingParams
        self.max_answer_tokens = args.max_answer_tokens
        self.max_prompt_tokens = args.max_prompt_tokens
        self.queue_length = args.batch + args.batch // 4
        self.running: dict[str, tuple[Turn, list[int]]] = {}
        self.follow_ups: deque[Turn] = deque()
        self.new_tokens = 0

    def run(
        self,
        turns: Iterable[Turn],
        answered: dict[str, list[int]],
        shard: TextIO,
        writer: CacheWriter,
        token_limit: int,
        deadline: float,
    ) -> None:
        """Answers ``turns`` until they end, the shards hold ``token_limit`` tokens or time is up.

        Args:
            turns: first turns of conversations.
            answered: answers of earlier runs by turn key; grows with this run's.
            shard: file for the new records.
            writer: of the hidden state cache.
            token_limit: number of answer tokens, those of earlier runs included.
            deadline: value of ``time.monotonic()`` after which nothing new is started.
        """
        source = iter(turns)
        known = sum(len(ids) for ids in answered.values())
        started = reported = time.monotonic()
        while True:
            if known + self.new_tokens < token_limit and time.monotonic() < deadline:
                self._fill(source, answered)
            if not self.running:
                return
            for output in self.engine.step():
                answer = list(output.outputs[0].token_ids)
                if output.finished:
                    reason = output.outputs[0].finish_reason
                elif self._repeats(output.request_id, answer):
                    self.engine.abort_request([output.request_id])
                    reason = "repetition"
                else:
                    continue
                self._finish(output.request_id, answer, reason, answered, shard, writer)
            if time.monotonic() - reported > 20:
                reported = time.monotonic()
                _report(known + self.new_tokens, token_limit, self.new_tokens, reported - started)

    def _fill(self, source: Iterator[Turn], answered: dict[str, list[int]]) -> None:
        """Adds requests until the queue is full or nothing is left to ask."""
        while len(self.running) < self.queue_length:
            turn = self.follow_ups.popleft() if self.follow_ups else next(source, None)
            if turn is None:
                return
            if turn.key in answered:
                self._plan_follow_up(turn, answered[turn.key])
                continue
            prompt = self.tokenizer.apply_chat_template(
                turn.messages, add_generation_prompt=True, return_dict=True
            )["input_ids"]
            if len(prompt) > self.max_prompt_tokens:
                continue
            self.engine.add_request(turn.key, {"prompt_token_ids": prompt}, self._sampling_of(turn))
            self.running[turn.key] = (turn, prompt)

    def _sampling_of(self, turn: Turn) -> Any:
        """Greedy up to the usual length, but for a first turn that says otherwise."""
        plan, first = turn.conversation, turn.number == 0
        return self.make_sampling(
            temperature=plan.temperature if first else 0.0,
            max_tokens=(plan.max_tokens if first else None) or self.max_answer_tokens,
            detokenize=False,
        )

    def _repeats(self, request: str, answer: list[int]) -> bool:
        """Whether a running answer goes in circles."""
        turn = self.running[request][0]
        fresh, turn.watched = answer[turn.watched :], len(answer)
        return any([turn.watch.repeats(token) for token in fresh])

    def _finish(
        self,
        request: str,
        answer: list[int],
        reason: str,
        answered: dict[str, list[int]],
        shard: TextIO,
        writer: CacheWriter,
    ) -> None:
        turn, prompt = self.running.pop(request)
        record = {
            "id": turn.key,
            "source": turn.source,
            "prompt_ids": prompt,
            "answer_ids": answer,
            "finish": reason,
        }
        shard.write(json.dumps(record) + "\n")
        shard.flush()
        # The last token was sampled but not fed back, so it has no hidden state and needs none.
        states = self.capture.take(turn.key, len(prompt) + len(answer) - 1)
        if states is not None and long_enough(record):
            writer.add(record, *states)
        answered[turn.key] = answer
        self.new_tokens += len(answer)
        self._plan_follow_up(turn, answer)

    def _plan_follow_up(self, turn: Turn, answer: list[int]) -> None:
        """Queues the next turn of the conversation, if there is one."""
        plan, number = turn.conversation, turn.number + 1
        if number >= len(plan.turns):
            return
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        if plan.quoting:
            if len(answer) < MIN_QUOTED_TOKENS:
                return
            complete = answer[-1] == self.tokenizer.eos_token_id
            text = quotation(text, complete, one_line=int(plan.key, 16) % 2 == 0)
            question = plan.turns[number].replace("{text}", text)
            messages = [{"role": "user", "content": question}]
        else:
            messages = [
                *turn.messages,
                {"role": "assistant", "content": text},
                {"role": "user", "content": plan.turns[number]},
            ]
        self.follow_ups.append(Turn(plan, number, messages))


def _report(total: int, limit: int, new: int, seconds: float) -> None:
    rate = new / seconds
    left = (limit - total) / max(rate, 1e-9) / 60
    print(f"{total} of {limit} tokens, {rate:.0f} tokens/s, {left:.0f} min left", flush=True)


def _first_turns(conversations: Iterable[Conversation]) -> Iterator[Turn]:
    for item in conversations:
        yield Turn(item, 0, [{"role": "user", "content": item.turns[0]}])


def _new_shard(folder: Path) -> Path:
    taken = [int(path.stem.split("-")[1]) for path in folder.glob("shard-*.jsonl")]
    return folder / f"shard-{max(taken, default=-1) + 1:03d}.jsonl"


def main() -> None:
    """Command line; see README.md."""
    parser = argparse.ArgumentParser(description="self-generated answers for head training")
    parser.add_argument("--model", type=Path, required=True, help="folder of the target model")
    parser.add_argument("--data", type=Path, required=True, help="folder of the question sets")
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    parser.add_argument("--work", type=Path, required=True, help="folder for hidden states")
    parser.add_argument("--aux-layers", type=int, nargs=3, default=[2, 15, 27])
    parser.add_argument("--tokens", type=int, default=1_200_000, help="answer tokens to reach")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop asking after this time")
    parser.add_argument("--batch", type=int, default=96, help="requests decoded together")
    parser.add_argument("--mix", choices=TOKEN_SHARES, default="base", help="kinds of prompts")
    parser.add_argument("--questions", type=Path, help="file of self_written.py, for --mix broad")
    parser.add_argument("--general", type=int, default=4000, help="chat prompts to compose")
    parser.add_argument("--max-answer-tokens", type=int, default=400)
    parser.add_argument("--max-prompt-tokens", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    deadline = time.monotonic() + 60 * args.minutes
    conversations = training_conversations(
        args.data, args.seed, args.general, args.mix, args.questions
    )
    args.out.mkdir(parents=True, exist_ok=True)
    answered = {record["id"]: record["answer_ids"] for record in read_records(args.out)}
    hidden_size = json.loads((args.model / "config.json").read_text())["hidden_size"]
    cache = HiddenStateCache(args.work / "hidden_states", hidden_size, tuple(args.aux_layers))
    generator = Generator(args)
    turns = _first_turns(conversations)
    with _new_shard(args.out).open("a", encoding="utf-8") as shard, CacheWriter(cache) as writer:
        generator.run(turns, answered, shard, writer, args.tokens, deadline)


if __name__ == "__main__":
    main()
