# SPDX-License-Identifier: Apache-2.0
"""Trains an EAGLE-3 head on the target's own answers and writes it in vLLM's layout.

First the target's hidden states are computed once and kept on disk, then the head is trained with
several simulated drafting steps. Both parts go on where an interrupted run stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from draft_model import Batch, DraftHead, HeadShape
from generate import read_records
from hidden_states import Entry, HiddenStateCache
from safetensors.torch import load_file, save_file
from torch import nn

HELD_OUT_SHARE = 64  # one chat in this many is kept for validation
MIN_LEARNING_RATE = 0.02  # of the peak, at the end


def answers_of(cache: HiddenStateCache) -> list[dict[str, Any]]:
    """Source and answer tokens of every chat."""
    return [
        {"source": entry.source, "answer_ids": cache.tokens_of(chat)[entry.prompt :].tolist()}
        for chat, entry in enumerate(cache.entries)
    ]


def choose_draft_vocabulary(
    answers: list[dict[str, Any]], size: int, vocab_size: int
) -> tuple[torch.Tensor, float]:
    """The most frequent answer tokens; ties and free places go to the lowest ids.

    Returns:
        [size] ascending target ids, and the share of answer tokens that they cover.
    """
    counts = Counter(token for answer in answers for token in answer["answer_ids"])
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    chosen = sorted(ranked[:size])
    covered = sum(counts[token] for token in chosen) / counts.total()
    return torch.tensor(chosen), covered


def coverage_by_source(answers: list[dict[str, Any]], ids: torch.Tensor) -> dict[str, float]:
    """Share of each source's answer tokens that is among ``ids``."""
    chosen = set(ids.tolist())
    total, covered = Counter[str](), Counter[str]()
    for answer in answers:
        total[answer["source"]] += len(answer["answer_ids"])
        covered[answer["source"]] += sum(token in chosen for token in answer["answer_ids"])
    return {source: covered[source] / total[source] for source in total}


# --- batches ------------------------------------------------------------------------------------


def held_out(entry: Entry) -> bool:
    """Whether a chat serves for validation; all turns of a conversation fall on one side."""
    return int(entry.id.split("/")[0], 16) % HELD_OUT_SHARE == 0


def some_of(
    cache: HiddenStateCache, chats: list[int], shares: dict[str, float], rng: random.Random
) -> list[int]:
    """Those chats that take part in one epoch: of the named sources a random share, else all."""
    return [chat for chat in chats if rng.random() < shares.get(cache.entries[chat].source, 1.0)]


def batches_of(
    cache: HiddenStateCache, chats: list[int], answer_tokens: int, rng: random.Random
) -> list[list[int]]:
    """Random batches of chats of similar length, about ``answer_tokens`` answer rows each."""
    order = chats.copy()
    rng.shuffle(order)
    batches: list[list[int]] = []
    for start in range(0, len(order), 128):
        pool = sorted(order[start : start + 128], key=lambda chat: cache.entries[chat].answer_rows)
        batch: list[int] = []
        rows = 0
        for chat in pool:
            batch.append(chat)
            rows += cache.entries[chat].answer_rows
            if rows >= answer_tokens:
                batches.append(batch)
                batch, rows = [], 0
        if batch:
            batches.append(batch)
    rng.shuffle(batches)
    return batches


def collate(cache: HiddenStateCache, chats: list[int]) -> Batch:
    """Reads ``chats`` from the cache and lays their rows out."""
    entries = [cache.entries[chat] for chat in chats]
    longest_prompt = max(entry.prompt for entry in entries) - 1
    columns = longest_prompt + max(entry.answer_rows for entry in entries)
    parts: dict[str, list[torch.Tensor]] = {}
    first_column = []
    context_rows = answer_rows = 0
    for number, (chat, entry) in enumerate(zip(chats, entries, strict=True)):
        tokens = cache.tokens_of(chat)
        first = longest_prompt - (entry.prompt - 1)
        first_column.append(first)
        place = torch.arange(entry.context_rows)
        answer = place[entry.prompt - 1 :]
        fields = {
            "aux": cache.aux_of(chat),
            "next_ids": tokens[1:-1],
            "positions": place,
            "slots": place + number * columns + first,
            "answer": answer + context_rows,
            "chat": torch.full_like(answer, number),
            "end": torch.full_like(answer, answer_rows + len(answer)),
            "final": cache.final_of(chat),
            "labels": tokens[entry.prompt + 1 :],
        }
        for name, value in fields.items():
            parts.setdefault(name, []).append(value)
        context_rows += entry.context_rows
        answer_rows += entry.answer_rows
    joined = {name: torch.cat(values) for name, values in parts.items()}
    return Batch(first_column=torch.tensor(first_column), columns=columns, **joined)


# --- checkpoints and the written head -----------------------------------------------------------


def replace_file(path: Path, write: Any) -> None:
    """Calls ``write(temporary_path)`` and renames the result to ``path``."""
    temporary = path.with_name(f".{path.name}.tmp")
    write(temporary)
    os.replace(temporary, path)


def head_config(target: dict[str, Any], shape: HeadShape) -> dict[str, Any]:
    """config.json of the head for vLLM."""
    theta = shape.rope_theta
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": shape.draft_vocab_size,
        "hidden_size": shape.hidden_size,
        "target_hidden_size": target["hidden_size"],
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": True,
        "fc_norm": True,
        "num_aux_hidden_states": len(shape.aux_layers),
        "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
        "bos_token_id": target["bos_token_id"],
        "eos_token_id": target["eos_token_id"],
        "pad_token_id": target["pad_token_id"],
        "torch_dtype": "bfloat16",
    }


def write_head(
    out: Path, head: DraftHead, target: dict[str, Any], provenance: dict[str, Any]
) -> None:
    """Writes config.json, model.safetensors (bf16) and provenance.json, each atomically."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to(torch.bfloat16) for name, value in head.state_dict().items()}
    # vLLM adds d2t to the draft id: it is an offset, not the target id itself.
    tensors["d2t"] = head.target_ids - torch.arange(len(head.target_ids))
    replace_file(
        out / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"})
    )
    (out / "model.safetensors").chmod(0o644)
    for name, content in (
        ("config.json", head_config(target, head.shape)),
        ("provenance.json", provenance),
    ):
        text = json.dumps(content, indent=2) + "\n"
        replace_file(out / name, lambda path, text=text: path.write_text(text, encoding="utf-8"))


@torch.no_grad()
def start_from_head(head: DraftHead, folder: Path) -> None:
    """Takes over the weights of an earlier head; output rows are matched by target token.

    A token that the earlier head could not draft starts with the row that the linear map from the
    target's output rows to the earlier head's foresees. The target's own row would not do: training
    has turned and shifted the others so far that the new tokens would be drafted everywhere.
    """
    saved = load_file(folder / "model.safetensors")
    saved_ids = saved.pop("d2t") + torch.arange(saved["lm_head.weight"].shape[0])
    saved_rows = saved.pop("lm_head.weight").float()
    rows = head.draft_ids[saved_ids]
    shared = rows >= 0
    head.lm_head.weight.copy_(foreseen_rows(head, saved_ids, saved_rows))
    head.lm_head.weight[rows[shared]] = saved_rows[shared]
    head.load_state_dict({k: v.float() for k, v in saved.items()}, strict=False)


def foreseen_rows(
    head: DraftHead, saved_ids: torch.Tensor, saved_rows: torch.Tensor
) -> torch.Tensor:
    """[draft_vocab, hidden] output rows of ``head`` by a ridge regression on those of another."""

    def features(ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([head.embedding[ids].float(), torch.ones(len(ids), 1)], dim=1)

    known = features(saved_ids)
    gram = known.T @ known + 0.1 * torch.eye(known.shape[1])
    return features(head.target_ids) @ torch.linalg.solve(gram, known.T @ saved_rows)


def make_optimizers(
    head: DraftHead, lr: float, weight_decay: float
) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the inner matrices, AdamW for the output rows and the norms."""
    inner = [p for p in head.parameters() if p.ndim == 2 and p is not head.lm_head.weight]
    norms = [p for p in head.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": [head.lm_head.weight], "weight_decay": weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return (
        torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True),
        torch.optim.Muon(inner, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
    )


# --- training -----------------------------------------------------------------------------------


class Training:
    """State of a training run: head, optimiser, progress, and the files they are kept in."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoModelForCausalLM

        self.args = args
        torch.manual_seed(args.seed)
        self.target_config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
        target = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
        self.cache = HiddenStateCache(
            args.work / "hidden_states", self.target_config["hidden_size"], tuple(args.aux_layers)
        )
        self.cache.extend(target, read_records(args.answers))
        print(f"{self.cache.cut_repetitions()} answer tokens are repetition and left out")
        answers = answers_of(self.cache)
        ids, self.coverage = choose_draft_vocabulary(
            answers, args.draft_vocab, self.target_config["vocab_size"]
        )
        print(f"draft vocabulary covers {100 * self.coverage:.2f} % of the answer tokens:")
        for source, share in coverage_by_source(answers, ids).items():
            print(f"  {100 * share:.2f} % of {source}")
        self.head = DraftHead(self._shape(), target.model.embed_tokens.weight.detach(), ids)
        self.head.start_from_target(target)
        if args.init_from:
            start_from_head(self.head, args.init_from)
        chats = range(len(self.cache.entries))
        self.train_chats = [c for c in chats if not held_out(self.cache.entries[c])]
        self.test_chats = [c for c in chats if held_out(self.cache.entries[c])]
        self.optimizers = make_optimizers(self.head, args.lr, args.weight_decay)
        self.step = 0
        self.seconds = 0.0
        self.seen_tokens = 0
        self.checkpoint = args.work / "checkpoint.pt"
        if self.checkpoint.exists():
            self._load(ids)

    def _shape(self) -> HeadShape:
        config = self.target_config
        return HeadShape(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            draft_vocab_size=self.args.draft_vocab,
            aux_layers=tuple(self.args.aux_layers),
            rope_theta=config["rope_theta"],
            rms_norm_eps=config["rms_norm_eps"],
        )

    def _load(self, ids: torch.Tensor) -> None:
        saved = torch.load(self.checkpoint, weights_only=True)
        if not torch.equal(saved["target_ids"], ids):
            raise SystemExit(
                f"error: the answers changed since {self.checkpoint} was written, and with them "
                "the draft vocabulary; remove it, or start from its head with --init-from"
            )
        self.head.load_state_dict(saved["head"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.step, self.seconds = saved["step"], saved["seconds"]
        self.seen_tokens = saved["seen_tokens"]
        print(f"going on from step {self.step}")

    def _save(self) -> None:
        state = {
            "head": self.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "target_ids": self.head.target_ids,
            "step": self.step,
            "seconds": self.seconds,
            "seen_tokens": self.seen_tokens,
        }
        replace_file(self.checkpoint, lambda path: torch.save(state, path))

    def _batches(self) -> Iterator[list[int]]:
        """Batches from the current step on, epoch after epoch, each epoch with its own order."""
        passed = 0
        for epoch in range(10_000):
            rng = random.Random(f"{self.args.seed}/{epoch}")
            chats = some_of(self.cache, self.train_chats, self.args.share, rng)
            for batch in batches_of(self.cache, chats, self.args.batch_tokens, rng):
                if passed >= self.step:
                    yield batch
                passed += 1

    def progress(self) -> float:
        """Share of the run that is done: by the clock if --minutes is given, else by steps."""
        if self.args.minutes:
            return self.seconds / (60 * self.args.minutes)
        return self.step / self.args.steps

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine down to ``MIN_LEARNING_RATE`` of the peak."""
        args = self.args
        if self.step < args.warmup:
            return args.lr * (self.step + 1) / args.warmup
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress())))
        return args.lr * (MIN_LEARNING_RATE + (1 - MIN_LEARNING_RATE) * cosine)

    def _minutes_left(self) -> float:
        done = self.progress()
        return self.seconds / 60 * (1 - done) / max(done, 1e-9)

    def _set_learning_rate(self, rate: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def _loss(self, chats: list[int]) -> tuple[torch.Tensor, list[dict[str, float]], int]:
        args = self.args
        batch = collate(self.cache, chats)
        loss, report = self.head.loss(
            batch, args.unroll, args.decay, args.hard_weight, args.min_path
        )
        return loss, report, len(batch.answer)

    def run(self) -> None:
        """Trains until ``progress`` says 1, with checkpoints, and writes the head at the end."""
        args = self.args
        saved_at = time.monotonic()
        window: list[list[dict[str, float]]] = []
        for chats in self._batches():
            if self.progress() >= 1:
                break
            begun = time.monotonic()
            rate = self.learning_rate()
            self._set_learning_rate(rate)
            loss, report, tokens = self._loss(chats)
            loss.backward()
            nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self.seen_tokens += tokens
            self.seconds += time.monotonic() - begun
            window.append(report)
            if self.step % args.report_every == 0:
                print(
                    f"step {self.step} ({100 * self.progress():.0f} %) {summary(window)} "
                    f"lr {rate:.1e} {self._minutes_left():.1f} min left",
                    flush=True,
                )
                window = []
            if time.monotonic() - saved_at > 60 * args.checkpoint_minutes:
                saved_at = time.monotonic()
                self._save()
                self.write()
        self._save()
        self.write(self.validate())

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Accuracy on the held-out chats; also printed for each source."""
        by_source: dict[str, list[int]] = {}
        for chat in self.test_chats:
            by_source.setdefault(self.cache.entries[chat].source, []).append(chat)
        every = []
        for source, chats in by_source.items():
            batches = batches_of(self.cache, chats, self.args.batch_tokens, random.Random(0))
            reports = [self._loss(batch)[1] for batch in batches]
            print(f"validation of {len(chats)} {source}: {summary(reports)}", flush=True)
            every += reports
        print(f"validation {summary(every)}", flush=True)
        return accuracies(every)

    def write(self, validation: dict[str, Any] | None = None) -> None:
        """Writes the head as it is now."""
        write_head(self.args.out, self.head, self.target_config, self._provenance(validation))

    def _provenance(self, validation: dict[str, Any] | None) -> dict[str, Any]:
        entries = self.cache.entries
        answers = Counter[str]()
        for entry in entries:
            answers[entry.source] += entry.length - entry.prompt
        names = ("seed", "batch_tokens", "lr", "warmup", "weight_decay", "unroll", "decay")
        names += ("hard_weight", "min_path", "draft_vocab", "share")
        return {
            "target": "SmolLM2-135M-Instruct",
            "method": "EAGLE-3 with training-time test on answers of the target",
            "continued_from": self._earlier_training(),
            "steps_done": self.step,
            "answer_rows_seen": self.seen_tokens,
            "training_minutes": round(self.seconds / 60, 1),
            "hyper_parameters": {name: getattr(self.args, name) for name in names},
            "head": asdict(self.head.shape),
            "data": {
                "chats": dict(Counter(entry.source for entry in entries)),
                "answer_tokens": dict(answers),
                "answer_tokens_total": answers.total(),
                "held_out_chats": len(self.test_chats),
            },
            "draft_vocabulary_coverage": round(self.coverage, 5),
            "validation": validation,
            "versions": {name: version(name) for name in ("torch", "transformers", "safetensors")},
        }

    def _earlier_training(self) -> dict[str, Any] | None:
        """What the provenance of the head of --init-from says about its own training."""
        path = self.args.init_from and self.args.init_from / "provenance.json"
        if not path or not path.exists():
            return None
        names = ("continued_from", "steps_done", "answer_rows_seen", "training_minutes")
        names += ("hyper_parameters",)
        earlier = json.loads(path.read_text(encoding="utf-8"))
        return {name: earlier[name] for name in names if name in earlier}


def accuracies(reports: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Per step: share of its rows drafted right; and the accepted length that follows.

    ``path_right`` of step k over the rows of step 0 is the chance that a chain is accepted up to
    step k, so 1 + their sum is the expected accepted length with the bonus token.
    """
    steps = max(len(report) for report in reports)
    column = [[report[k] for report in reports if len(report) > k] for k in range(steps)]
    starts = sum(item["rows"] for item in column[0])
    reached = [sum(item["path_right"] for item in items) / starts for items in column]
    rows = [sum(item["rows"] for item in items) for items in column]
    right = [sum(item["right"] for item in items) for items in column]
    return {
        "accuracy": [round(r / n, 4) for r, n in zip(right, rows, strict=True)],
        "chain_reach": [round(share, 4) for share in reached],
        "expected_length_of_chain_4": round(1 + sum(reached[:4]), 3),
        "rows": rows,
        "loss": round(sum(item["loss"] for item in column[0]) / starts, 4),
    }


def summary(reports: list[list[dict[str, float]]]) -> str:
    """One line of ``accuracies``."""
    values = accuracies(reports)
    accuracy = " ".join(f"{value:.3f}" for value in values["accuracy"])
    share = " ".join(f"{n / values['rows'][0]:.2f}" for n in values["rows"])
    length = values["expected_length_of_chain_4"]
    return f"loss {values['loss']:.3f} accuracy [{accuracy}] rows [{share}] chain 4: {length:.2f}"


def source_share(text: str) -> tuple[str, float]:
    """Reads an argument of the form source=share."""
    source, _, share = text.partition("=")
    return source, float(share)


def arguments() -> argparse.Namespace:
    """Command line; see README.md."""
    parser = argparse.ArgumentParser(description="train an EAGLE-3 head")
    parser.add_argument("--model", type=Path, required=True, help="folder of the target model")
    parser.add_argument("--answers", type=Path, required=True, help="shards of generate.py")
    parser.add_argument("--work", type=Path, required=True, help="hidden states and checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--init-from", type=Path, help="start from this head instead of afresh")
    parser.add_argument("--steps", type=int, default=1440)
    parser.add_argument("--minutes", type=float, help="train this long, whatever --steps says")
    parser.add_argument("--batch-tokens", type=int, default=1536, help="answer tokens per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=40)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--unroll", type=int, default=5, help="simulated drafting steps")
    parser.add_argument("--decay", type=float, default=0.9, help="loss weight of each later step")
    parser.add_argument("--hard-weight", type=float, default=0.2, help="one-hot share of targets")
    parser.add_argument("--min-path", type=float, default=0.05, help="path probability to go on")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--aux-layers", type=int, nargs=3, default=[2, 15, 27])
    parser.add_argument(
        "--share",
        type=source_share,
        nargs="+",
        default=[],
        metavar="SOURCE=SHARE",
        help="train on a random part of a source in each epoch, such as gsm8k=0.5",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report-every", type=int, default=20)
    parser.add_argument("--checkpoint-minutes", type=float, default=5.0)
    args = parser.parse_args()
    args.share = dict(args.share)
    return args


def main() -> None:
    """Prepares hidden states, trains, writes the head."""
    args = arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    Training(args).run()


if __name__ == "__main__":
    main()
