# SPDX-License-Identifier: Apache-2.0
"""The EAGLE-3 head on the V1 runner: the catch-up pass, and one forward per draft layer."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_echo.core.draft import Frontier
from vllm_echo.integration.cpu.attention import EchoAttentionMetadata, TreeRows
from vllm_echo.integration.cpu.kv_writer import CHUNK, KvWriter
from vllm_echo.integration.heads.loading import (
    accounted_loading,
    refuse_unshared,
    report_layers,
)

SPLIT_FROM = 48
"""Rows that nobody drafts from are worth a pass of their own when there are this many."""


@dataclass
class HeadRows:
    """Rows of the head's forward over R requests, request-major, at linear positions: M rows.

    Draft position p holds the target's hidden state at p and the token at p + 1.
    """

    token_ids: torch.Tensor
    """[M] int32, the token after each row."""
    positions: torch.Tensor
    """[M] int64."""
    slots: torch.Tensor
    """[M] int64, where their KV goes in the cache."""
    cu_rows: torch.Tensor
    """[R + 1] int32."""
    block_table: torch.Tensor
    """[R, B] int32."""


@dataclass
class CatchUpRows(HeadRows):
    """The target rows that a step made final, along the accepted paths."""

    step_rows: torch.Tensor
    """[M] int64, where they lie among the rows of the step's forward."""
    hidden_states: list[torch.Tensor]
    """Of every row of the forward, one [rows, H] for each auxiliary layer."""


class EchoDrafter(EagleProposer):
    """Loads and runs the head. What to draft is the pipeline's business."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: object):
        super().__init__(vllm_config, device, runner)
        self._target_ids: torch.Tensor | None = None
        self.kv_writer: KvWriter | None = None

    def _get_model(self) -> torch.nn.Module:
        with accounted_loading(self.speculative_config):
            return super()._get_model()

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        refuse_unshared(self.speculative_config.model, self.model)
        report_layers(self.speculative_config, target_model)
        self.kv_writer = KvWriter.of(self.model)
        offsets = self.model.draft_id_to_target_id
        if offsets is not None:
            self._target_ids = torch.arange(offsets.shape[0]) + offsets

    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """vLLM's warm-up runs the head once for each draft token; one run compiles or loads it,
        and a single run is all that ``is_graph_capturing`` asks for."""
        super().dummy_run(num_tokens, use_cudagraphs, True, slot_mappings)

    def slot_mapping(
        self, block_table: torch.Tensor, owner: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """[M] int64 cache slots of logical ``slots`` [M] of the requests ``owner`` [M]."""
        blocks = block_table[owner, torch.div(slots, self.block_size, rounding_mode="floor")]
        return blocks.long() * self.block_size + slots % self.block_size

    def catch_up(
        self, rows: CatchUpRows, drafting: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See to the draft KV of final rows; returns (for logits, for feedback) hidden states
        at the last row of every request in ``drafting`` [A] int64, [A, H] each.

        A row that nobody drafts from needs its KV only, which is less than half the work, and
        needs it when somebody drafts again.
        """
        writer = self.kv_writer
        if writer is not None and not drafting.numel():
            writer.put(
                rows.token_ids, rows.positions, rows.slots, rows.hidden_states, rows.step_rows
            )
            nothing = torch.empty(0, self.hidden_size, dtype=self.dtype)
            return nothing, nothing
        last = rows.cu_rows[1:].long() - 1
        num_others = rows.token_ids.shape[0] - drafting.shape[0]
        if writer is None or num_others < SPLIT_FROM and not writer.num_waiting:
            for_logits, for_feedback = self.run_rows(rows, self._combine(rows, rows.step_rows))
            return for_logits[last[drafting]], for_feedback[last[drafting]]
        roots = last[drafting]
        others = torch.ones(rows.token_ids.shape[0], dtype=torch.bool)
        others[roots] = False
        chosen = others.nonzero().flatten()
        writer.put(
            rows.token_ids[chosen],
            rows.positions[chosen],
            rows.slots[chosen],
            rows.hidden_states,
            rows.step_rows[chosen],
        )
        writer.flush()
        only_roots = HeadRows(
            token_ids=rows.token_ids[roots],
            positions=rows.positions[roots],
            slots=rows.slots[roots],
            cu_rows=torch.arange(drafting.shape[0] + 1, dtype=torch.int32),
            block_table=rows.block_table[drafting],
        )
        return self.run_rows(only_roots, self._combine(rows, rows.step_rows[roots]))

    def _combine(self, rows: CatchUpRows, step_rows: torch.Tensor) -> torch.Tensor:
        """[M, H]: what the head takes for the hidden states of ``step_rows`` [M]."""
        parts = [
            self.model.combine_hidden_states(torch.cat([h[part] for h in rows.hidden_states], -1))
            for part in step_rows.split(CHUNK)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def run_rows(self, rows: HeadRows, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole head over ``rows``, whose combined states are ``hidden`` [M, H]; returns
        (for logits, for feedback) of every row."""
        lens = rows.cu_rows.diff()
        last = rows.cu_rows[1:].long() - 1
        seq_lens = (rows.positions[last] + 1).to(torch.int32)
        _, metadata = self.build_per_group_and_layer_attn_metadata(
            CommonAttentionMetadata(
                query_start_loc=rows.cu_rows,
                query_start_loc_cpu=rows.cu_rows,
                seq_lens=seq_lens,
                seq_lens_cpu_upper_bound=seq_lens,
                num_reqs=lens.shape[0],
                num_actual_tokens=rows.token_ids.shape[0],
                max_query_len=int(lens.max()),
                max_seq_len=int(seq_lens.max()),
                block_table_tensor=rows.block_table,
                slot_mapping=rows.slots,
                causal=True,
            )
        )
        return self._forward(rows.token_ids, rows.positions, hidden, metadata, rows.slots)

    def expand_layer(
        self,
        frontier: Frontier,
        hidden: torch.Tensor,
        root_positions: torch.Tensor,
        block_table: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the frontier's nodes; ``hidden`` [A * F, H] is their parents'. Draft slots
        follow the root's. Returns hidden states as ``catch_up`` does, [A * F, H] each."""
        num_requests, width = frontier.tokens.shape
        roots = root_positions[frontier.requests]
        tables = block_table[frontier.requests]
        owner = torch.repeat_interleave(torch.arange(num_requests), width)
        node_slots = roots[:, None] + 1 + frontier.first_slot + torch.arange(width)
        slots = self.slot_mapping(tables, owner, node_slots.flatten())
        metadata = self._tree_metadata(frontier, roots, tables, slots)
        positions = (roots + frontier.depth).repeat_interleave(width)
        return self._forward(frontier.tokens.flatten(), positions, hidden, metadata, slots)

    def _tree_metadata(
        self, frontier: Frontier, roots: torch.Tensor, tables: torch.Tensor, slots: torch.Tensor
    ) -> dict[str, EchoAttentionMetadata]:
        num_requests, width = frontier.tokens.shape
        cu_rows = torch.arange(num_requests + 1, dtype=torch.int32) * width
        context_lens = (roots + 1).to(torch.int32)
        metadata = EchoAttentionMetadata(
            num_actual_tokens=num_requests * width,
            max_query_len=width,
            query_start_loc=cu_rows,
            max_seq_len=int(context_lens.max()) + frontier.first_slot + width,
            seq_lens=context_lens,
            block_table=tables,
            slot_mapping=slots,
            scheduler_metadata=None,
            tree=TreeRows(
                slice(None), cu_rows, context_lens, frontier.ancestors.flatten(0, 1), tables
            ),
        )
        return dict.fromkeys(self._draft_attn_layer_names, metadata)

    def _forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        metadata: Mapping[str, object],
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=token_ids.shape[0],
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=dict.fromkeys(self._draft_attn_layer_names, slots),
        ):
            return self.model(input_ids=token_ids, positions=positions, hidden_states=hidden)

    def top_children(self, hidden: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[M, H] -> the ``width`` likeliest next tokens (target ids) and their
        log-probabilities over the draft vocabulary, [M, width] each."""
        # The model's own compute_logits spreads draft logits over the target's vocabulary.
        logits = self.model.logits_processor(self.model.lm_head, hidden)
        log_probs, draft_ids = logits.float().log_softmax(dim=-1).topk(width, dim=-1)
        tokens = draft_ids if self._target_ids is None else self._target_ids[draft_ids]
        return tokens.to(torch.int32), log_probs


class EagleDraftHead:
    """``vllm_echo.core.draft.DraftHead`` for one step, over R requests being drafted for."""

    def __init__(
        self,
        drafter: EchoDrafter,
        for_logits: torch.Tensor,
        for_feedback: torch.Tensor,
        root_positions: torch.Tensor,
        block_table: torch.Tensor,
    ):
        self._drafter = drafter
        self._for_logits = for_logits
        self._for_feedback = for_feedback
        self._root_positions = root_positions
        self._block_table = block_table

    def expand_roots(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._drafter.top_children(self._for_logits, width)

    def expand(self, frontier: Frontier, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        parents = self._for_feedback[frontier.parent_rows.flatten()]
        for_logits, self._for_feedback = self._drafter.expand_layer(
            frontier, parents, self._root_positions, self._block_table
        )
        tokens, log_probs = self._drafter.top_children(for_logits, width)
        shape = (*frontier.tokens.shape, width)
        return tokens.view(shape), log_probs.view(shape)
