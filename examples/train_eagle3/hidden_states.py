# SPDX-License-Identifier: Apache-2.0
"""A disk cache of what the target computes on its own answers.

For a chat of L tokens x_0 ... x_{L-1} of which the first P are the prompt, the head needs

* ``aux``: the residual stream before three of the target's layers at positions 0 ... L-3, as
  vLLM's ``eagle_aux_hidden_state_layer_ids`` counts them (id i: the input of layer i),
* ``final``: the normalised last hidden state at positions P ... L-2, from which the target's
  distribution of the next token follows,
* ``tokens``: x_0 ... x_{L-1}.

The three are appended to flat files, and ``index.jsonl`` gets a line per chat once its rows are
written; rows beyond the index (of an interrupted run) are cut off at the next start.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from repetition import length_before_repetition

MIN_ANSWER_TOKENS = 3


@dataclass(frozen=True)
class Entry:
    """One line of the index: a chat, its prompt tokens and all its tokens."""

    id: str
    source: str
    prompt: int
    length: int

    @property
    def context_rows(self) -> int:
        """Rows of ``aux``: every position that has two successors."""
        return self.length - 2

    @property
    def answer_rows(self) -> int:
        """Rows of ``final``: answer positions that have a successor."""
        return self.length - self.prompt - 1


class HiddenStateCache:
    """Append-only cache in a folder; reading goes through memory maps.

    Args:
        folder: where the files lie; created when it is missing.
        hidden_size: width of the target.
        aux_layers: ids of the three layers.
    """

    def __init__(self, folder: Path, hidden_size: int, aux_layers: tuple[int, ...]) -> None:
        self.folder = folder
        self.hidden_size = hidden_size
        self.aux_layers = aux_layers
        folder.mkdir(parents=True, exist_ok=True)
        self._check_layout()
        self.entries = self._read_index()
        self._cut_to_index()
        self.map()

    def _check_layout(self) -> None:
        layout = {"hidden_size": self.hidden_size, "aux_layers": list(self.aux_layers)}
        path = self.folder / "layout.json"
        if not path.exists():
            path.write_text(json.dumps(layout))
        elif json.loads(path.read_text()) != layout:
            raise ValueError(f"{self.folder} was made with other aux layers: {path.read_text()}")

    def _read_index(self) -> list[Entry]:
        path = self.folder / "index.jsonl"
        if not path.exists():
            return []
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the last line was torn by an interruption
            path.write_text(whole, encoding="utf-8")
        return [Entry(**json.loads(line)) for line in whole.splitlines()]

    def _sizes(self) -> dict[str, int]:
        """Bytes that the index accounts for, by file name."""
        context = sum(entry.context_rows for entry in self.entries)
        answer = sum(entry.answer_rows for entry in self.entries)
        tokens = sum(entry.length for entry in self.entries)
        width = 2 * self.hidden_size
        return {
            "aux.bin": context * width * len(self.aux_layers),
            "final.bin": answer * width,
            "tokens.bin": tokens * 4,
        }

    def _cut_to_index(self) -> None:
        for name, size in self._sizes().items():
            with (self.folder / name).open("ab") as file:
                file.truncate(size)

    def map(self) -> None:
        """Maps the files as they are now and computes where each chat's rows begin."""
        self.aux = self._mapped("aux.bin", np.int16, self.hidden_size * len(self.aux_layers))
        self.final = self._mapped("final.bin", np.int16, self.hidden_size)
        self.tokens = self._mapped("tokens.bin", np.int32, 1)
        self.aux_start = _starts(entry.context_rows for entry in self.entries)
        self.final_start = _starts(entry.answer_rows for entry in self.entries)
        self.token_start = _starts(entry.length for entry in self.entries)

    def _mapped(self, name: str, dtype: type, width: int) -> np.ndarray:
        path = self.folder / name
        if path.stat().st_size == 0:
            return np.empty((0, width), dtype)
        return np.memmap(path, dtype, mode="r").reshape(-1, width)

    def cut_repetitions(self) -> int:
        """Leaves out of this object's view what answers repeat; nothing may be added afterwards.

        Returns:
            The number of answer tokens that are left out. The files stay as they are.
        """
        left_out = 0
        for chat, entry in enumerate(self.entries):
            answer = self.tokens_of(chat)[entry.prompt :].tolist()
            kept = entry.prompt + length_before_repetition(answer)
            left_out += entry.length - kept
            self.entries[chat] = replace(entry, length=kept)
        return left_out

    def aux_of(self, chat: int) -> torch.Tensor:
        """[context_rows, 3 * hidden] bf16 of chat number ``chat``."""
        start = self.aux_start[chat]
        return _bf16(self.aux[start : start + self.entries[chat].context_rows])

    def final_of(self, chat: int) -> torch.Tensor:
        """[answer_rows, hidden] bf16 of chat number ``chat``."""
        start = self.final_start[chat]
        return _bf16(self.final[start : start + self.entries[chat].answer_rows])

    def tokens_of(self, chat: int) -> torch.Tensor:
        """[length] int64 of chat number ``chat``."""
        start = self.token_start[chat]
        rows = np.array(self.tokens[start : start + self.entries[chat].length, 0])
        return torch.from_numpy(rows).long()

    def extend(self, model: torch.nn.Module, records: Iterable[dict[str, Any]]) -> None:
        """Runs the target over those ``records`` that are not in the cache yet.

        Args:
            model: the target, a Hugging Face causal language model.
            records: as ``generate.py`` writes them.
        """
        known = {entry.id for entry in self.entries}
        fresh = [r for r in records if r["id"] not in known and long_enough(r)]
        total = sum(map(_length, fresh))
        done, started, reported = 0, time.monotonic(), time.monotonic()
        with CacheWriter(self) as writer:
            for batch in _by_length(fresh, tokens_per_batch=1024):
                self._compute(model, batch, writer)
                done += sum(map(_length, batch))
                if time.monotonic() - reported > 20:
                    reported = time.monotonic()
                    rate = done / (reported - started)
                    left = (total - done) / rate / 60
                    print(f"hidden states: {done}/{total}, {rate:.0f}/s, {left:.1f} min left")
        self.map()

    def _compute(
        self, model: torch.nn.Module, batch: list[dict[str, Any]], writer: CacheWriter
    ) -> None:
        """Computes and writes one batch of chats."""
        padded = torch.zeros(len(batch), max(map(_length, batch)), dtype=torch.long)
        for row, record in enumerate(batch):
            chat = record["prompt_ids"] + record["answer_ids"]
            padded[row, : len(chat)] = torch.tensor(chat)
        aux, final = target_states(model, padded, self.aux_layers)
        for row, record in enumerate(batch):
            writer.add(record, aux[row], final[row])


class CacheWriter:
    """Appends chats to a cache; rows are on disk before the index names them."""

    def __init__(self, cache: HiddenStateCache) -> None:
        self.cache = cache

    def __enter__(self) -> CacheWriter:
        folder = self.cache.folder
        self.files = {name: (folder / name).open("ab") for name in self.cache._sizes()}
        self.index = (folder / "index.jsonl").open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        for file in (*self.files.values(), self.index):
            file.close()

    def add(self, record: dict[str, Any], aux: torch.Tensor, final: torch.Tensor) -> None:
        """Writes one chat.

        Args:
            record: as ``generate.py`` writes it.
            aux: [at least length - 2, layers * hidden], from position 0.
            final: [at least length - 1, hidden], from position 0.
        """
        chat = record["prompt_ids"] + record["answer_ids"]
        entry = Entry(record["id"], record["source"], len(record["prompt_ids"]), len(chat))
        self.files["aux.bin"].write(_bytes(aux[: entry.context_rows]))
        self.files["final.bin"].write(_bytes(final[entry.prompt : entry.length - 1]))
        self.files["tokens.bin"].write(np.array(chat, np.int32).tobytes())
        for file in self.files.values():
            file.flush()
        self.index.write(json.dumps(asdict(entry)) + "\n")
        self.index.flush()
        self.cache.entries.append(entry)


def long_enough(record: dict[str, Any]) -> bool:
    """Whether a record has rows to learn from."""
    return len(record["answer_ids"]) >= MIN_ANSWER_TOKENS


def _length(record: dict[str, Any]) -> int:
    return len(record["prompt_ids"]) + len(record["answer_ids"])


@torch.inference_mode()
def target_states(
    model: torch.nn.Module, token_ids: torch.Tensor, aux_layers: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of right-padded chats (causal attention keeps padding out of real rows).

    Args:
        model: the target, a Hugging Face causal language model.
        token_ids: [chats, length] int64.
        aux_layers: ids of the layers whose inputs are wanted.

    Returns:
        aux [chats, length, len(aux_layers) * hidden] and the normalised last hidden state
        [chats, length, hidden].
    """
    output = model.model(token_ids, output_hidden_states=True, use_cache=False)
    aux = torch.cat([output.hidden_states[layer] for layer in aux_layers], dim=-1)
    return aux, output.last_hidden_state


def _starts(lengths: Iterable[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(list(lengths), dtype=np.int64)]).astype(np.int64)


def _bf16(rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(rows)).view(torch.bfloat16)


def _bytes(rows: torch.Tensor) -> bytes:
    return rows.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()


def _by_length(
    records: list[dict[str, Any]], tokens_per_batch: int
) -> Iterator[list[dict[str, Any]]]:
    """Batches of chats of similar length, at most ``tokens_per_batch`` padded tokens each."""
    batch: list[dict[str, Any]] = []
    for record in sorted(records, key=_length):
        if batch and (len(batch) + 1) * _length(record) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(record)
    if batch:
        yield batch
