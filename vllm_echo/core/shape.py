# SPDX-License-Identifier: Apache-2.0
"""The shape of what is drafted: how far and how wide, and where in the tables it lies."""

from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_echo.core.tree import BITS_PER_WORD, num_words


@dataclass(frozen=True)
class TreeShape:
    """How far and how wide trees can be drafted."""

    max_depth: int
    """Deepest layer that is ever drafted."""
    top_k: int
    """Children drafted per expanded node."""
    frontier_widths: tuple[int, ...]
    """Nodes of depth 1, 2, ... that are expanded (``max_depth - 1`` entries)."""

    @classmethod
    def within(cls, max_depth: int, top_k: int, max_nodes: int) -> "TreeShape":
        """top_k nodes a layer are expanded while draft slots last, and one of every later layer.

        A request has ``max_nodes`` draft slots (what the engine reserves ahead), and an
        expanded node that is not among its best ``max_nodes`` is wasted, so at most
        ``max_nodes - 1`` are expanded in all. Needs ``max_depth <= max_nodes``.
        """
        left = max_nodes - 1
        widths = []
        for later_layers in reversed(range(max_depth - 1)):
            widths.append(min(top_k, left - later_layers))
            left -= widths[-1]
        return cls(max_depth, top_k, tuple(widths))

    def first_slot(self, depth: int) -> int:
        """Draft slots taken by expanded nodes above ``depth``."""
        return sum(self.frontier_widths[: depth - 1])

    @property
    def num_draft_slots(self) -> int:
        """Draft slots that a request needs beyond its root."""
        return sum(self.frontier_widths)

    @property
    def num_candidates(self) -> int:
        """C, columns of a table of candidates."""
        return self.layer_columns(self.max_depth)[1]

    def layer_columns(self, depth: int) -> tuple[int, int]:
        """First and end column of the candidates at ``depth``."""
        first = self.top_k * (1 + self.first_slot(depth - 1)) if depth > 1 else 0
        parents = self.frontier_widths[depth - 2] if depth > 1 else 1
        return first, first + self.top_k * parents

    @cached_property
    def column_depths(self) -> torch.Tensor:
        """[C] int32."""
        sizes = [self.layer_columns(d) for d in range(1, self.max_depth + 1)]
        return torch.repeat_interleave(
            torch.arange(1, self.max_depth + 1, dtype=torch.int32),
            torch.tensor([last - first for first, last in sizes]),
        )

    def own_bits(self, depth: int) -> torch.Tensor:
        """[F, W] int64: the bit of each expanded node's own draft slot at ``depth``."""
        return self._own_bits[depth - 1]

    @cached_property
    def _own_bits(self) -> list[torch.Tensor]:
        words = num_words(self.num_draft_slots)
        bits = []
        for depth, width in enumerate(self.frontier_widths, start=1):
            slots = self.first_slot(depth) + torch.arange(width)
            rows = torch.zeros(width, words, dtype=torch.int64)
            rows[torch.arange(width), slots // BITS_PER_WORD] = torch.ones_like(slots) << (
                slots % BITS_PER_WORD
            )
            bits.append(rows)
        return bits
