# SPDX-License-Identifier: Apache-2.0
"""The head's KV of rows that nobody drafts from: without the rest of the head, and later."""

import numpy as np
import torch
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM, LlamaModel

from vllm_echo.integration.log import echo_logger

logger = echo_logger(__name__)

CHUNK = 512
"""Rows written at once. A pass over a few rows costs as much as one over a hundred; one over
thousands needs temporaries too large for the allocator to keep, at twice the work's own time."""


class KvWriter:
    """A write-behind buffer of final rows; ``flush`` before anything reads the head's KV.

    In a head of one decoder layer a row's key and value depend on its own inputs only, so
    attention, MLP and output layer can be left out where nobody reads their result. And while
    nobody drafts nobody reads the keys either: a plain step costs a copy of its rows here.

    Cache slots are taken when a row is put, and rows are written in the order in which they
    came, so the cache ends up as if each had been written at once, also where a block has been
    given to another request meanwhile.
    """

    def __init__(self, head: Eagle3LlamaForCausalLM):
        self._head = head
        self._layer = head.model.layers[0]
        self._num_rows = 0
        self._token_ids = torch.empty(CHUNK, dtype=torch.int32)
        self._positions = torch.empty(CHUNK, dtype=torch.int64)
        self._slots = torch.empty(CHUNK, dtype=torch.int64)
        self._states: torch.Tensor | None = None
        """[CHUNK, A * H], the auxiliary layers' states side by side; made for the first row."""

    @classmethod
    def of(cls, head: torch.nn.Module) -> "KvWriter | None":
        """None for heads of another make: they run as a whole (said at start-up)."""
        model = getattr(head, "model", None)
        if not isinstance(model, LlamaModel) or len(model.layers) != 1:
            logger.info(
                "ECHO: the head %s is no single Llama layer; catch-up runs all of it for every row",
                type(head).__name__,
            )
            return None
        return cls(head)

    @property
    def num_waiting(self) -> int:
        """Rows that were put and are not written yet."""
        return self._num_rows

    def put(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        hidden_states: list[torch.Tensor],
        step_rows: torch.Tensor,
    ) -> None:
        """``token_ids``, ``positions``, cache ``slots`` and ``step_rows`` [M]: the rows, and where
        they lie in ``hidden_states``, one [rows, H] for each auxiliary layer. All are copied."""
        if self._states is None:
            width = sum(states.shape[-1] for states in hidden_states)
            self._states = torch.empty(CHUNK, width, dtype=hidden_states[0].dtype)
        done = 0
        while done < step_rows.shape[0]:
            first = self._num_rows
            taken = slice(done, done + CHUNK - first)
            rows = step_rows[taken]
            done, last = done + rows.shape[0], first + rows.shape[0]
            self._token_ids[first:last] = token_ids[taken]
            self._positions[first:last] = positions[taken]
            self._slots[first:last] = slots[taken]
            torch.cat([states[rows] for states in hidden_states], -1, out=self._states[first:last])
            self._num_rows = last
            if last == CHUNK:
                self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._num_rows == 0:
            return
        assert self._states is not None
        waiting = slice(0, self._num_rows)
        self._num_rows = 0
        rows = self._token_ids, self._positions, self._slots, self._states
        token_ids, positions, slots, states = (column[waiting] for column in rows)
        kept = last_of_each(slots.numpy())
        if kept.shape[0] < slots.shape[0]:
            # The kernel writes rows in parallel.
            chosen = torch.from_numpy(kept)
            token_ids, positions, slots, states = (
                column[chosen] for column in (token_ids, positions, slots, states)
            )
        self._write(token_ids, positions, slots, self._head.combine_hidden_states(states))

    def _write(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        """``token_ids``, ``positions``, ``slots`` [M] and combined states ``hidden`` [M, H]."""
        layer, attention = self._layer, self._layer.self_attn
        embeds = layer.input_layernorm(self._head.model.embed_input_ids(token_ids))
        normed, _ = layer._residual_norm(hidden_states=hidden)
        qkv, _ = attention.qkv_proj(torch.cat([embeds, normed], dim=-1))
        query, key, value = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], -1)
        _, key = attention.rotary_emb(positions, query, key)
        shape = (-1, attention.num_kv_heads, attention.head_dim)
        inner = attention.attn
        inner.impl.do_kv_cache_update(
            inner, key.reshape(shape), value.reshape(shape), inner.kv_cache, slots
        )


def last_of_each(values: np.ndarray) -> np.ndarray:
    """Indices of the last occurrence of every value in ``values`` [M], by value."""
    _, from_end = np.unique(values[::-1], return_index=True)
    return values.shape[0] - 1 - from_end
