# SPDX-License-Identifier: Apache-2.0
"""An oracle drafter: it knows what plain decoding emits, and plants it in the tree.

At every node the true next token becomes a random child with a given probability, among
random wrong ones; scores are random, so nodes stand in a random topological order. A weak
head hardly ever accepts scattered rows; this one does it all the time, which is what
compaction, depth positions and masks must survive."""

from collections.abc import Sequence

import torch

from vllm_echo.core.draft import Frontier


class OracleHead:
    """``DraftHead`` for R requests whose true continuations are known."""

    def __init__(
        self,
        truths: Sequence[Sequence[int]],
        vocab_size: int,
        hit_rate: float,
        gen: torch.Generator,
    ):
        self._truths = truths
        self._vocab_size = vocab_size
        self._hit_rate = hit_rate
        self._gen = gen
        self._on_truth = torch.ones(len(truths), dtype=torch.bool)
        self._owners = torch.arange(len(truths))

    def expand_roots(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._children(self._on_truth, self._owners, 0, width)

    def expand(self, frontier: Frontier, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        flat_parents = frontier.parent_rows.flatten()
        owners = frontier.requests.repeat_interleave(frontier.tokens.shape[1])
        wanted = torch.tensor([self._truth(r, frontier.depth - 1) for r in owners.tolist()])
        self._on_truth = self._on_truth[flat_parents] & (frontier.tokens.flatten() == wanted)
        tokens, log_probs = self._children(self._on_truth, owners, frontier.depth, width)
        shape = (*frontier.tokens.shape, width)
        return tokens.view(shape), log_probs.view(shape)

    def _truth(self, request: int, depth: int) -> int:
        truth = self._truths[request]
        return truth[depth] if depth < len(truth) else -1

    def _children(
        self, on_truth: torch.Tensor, owners: torch.Tensor, depth: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``width`` distinct tokens per node, the truth at a random place on hits."""
        num_nodes = owners.shape[0]
        tokens = torch.rand(num_nodes, self._vocab_size, generator=self._gen).argsort(dim=1)[
            :, :width
        ]
        hits = on_truth & (torch.rand(num_nodes, generator=self._gen) < self._hit_rate)
        for node in hits.nonzero().flatten().tolist():
            truth = self._truth(int(owners[node]), depth)
            if truth >= 0 and truth not in tokens[node]:
                tokens[node, int(torch.randint(width, (1,), generator=self._gen))] = truth
        log_probs = -torch.rand(num_nodes, width, generator=self._gen)
        return tokens.to(torch.int32), log_probs.sort(dim=1, descending=True).values
