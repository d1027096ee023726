# SPDX-License-Identifier: Apache-2.0
"""The EAGLE-3 head on the V1 runner: the catch-up pass, and one forward per draft layer."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.llama_eagle3 import LlamaModel
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_echo.draft import Frontier
from vllm_echo.errors import EchoError
from vllm_echo.integration.cpu.attention import EchoAttentionMetadata, TreeRows

logger = init_logger(__name__)

SPLIT_FROM = 16
"""Rows that nobody drafts from are worth a pass of their own when there are this many."""
CHUNK = 512
"""Rows of prompts are taken in chunks: temporaries of thousands of rows are too large for the
allocator to keep, and getting them from the kernel each time takes twice the work's own time."""


class KvWriter:
    """The draft KV of rows without the rest of the head.

    In a head of one decoder layer a row's key and value depend on its own inputs only, so
    attention, MLP and output layer can be left out where nobody reads their result.
    """

    def __init__(self, model: LlamaModel):
        self._model = model
        self._layer = model.layers[0]

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
        return cls(model)

    def write(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """``token_ids``, ``positions``, ``slots`` [M], ``hidden`` [M, H] (combined states)."""
        layer, attention = self._layer, self._layer.self_attn
        embeds = layer.input_layernorm(self._model.embed_input_ids(token_ids))
        normed, _ = layer._residual_norm(hidden_states=hidden)
        qkv, _ = attention.qkv_proj(torch.cat([embeds, normed], dim=-1))
        query, key, value = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], -1)
        _, key = attention.rotary_emb(positions, query, key)
        shape = (-1, attention.num_kv_heads, attention.head_dim)
        inner = attention.attn
        inner.impl.do_kv_cache_update(
            inner, key.reshape(shape), value.reshape(shape), inner.kv_cache, slots
        )


@dataclass
class HeadRows:
    """Rows of the head's forward over R requests, request-major, at linear positions: M rows.

    Draft position p holds the target's hidden state at p and the token at p + 1.
    """

    token_ids: torch.Tensor
    """[M] int32, the token after each row."""
    positions: torch.Tensor
    """[M] int64."""
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

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        self.kv_writer = KvWriter.of(self.model)
        offsets = self.model.draft_id_to_target_id
        if offsets is not None:
            self._target_ids = torch.arange(offsets.shape[0]) + offsets
            if self._target_ids.unique().shape[0] != self._target_ids.shape[0]:
                raise EchoError(
                    f"speculative_config.model: {self.speculative_config.model}: its d2t maps "
                    "several draft tokens to one target token; siblings must be distinct. "
                    "Use a head with a one-to-one d2t."
                )

    def slot_mapping(
        self, block_table: torch.Tensor, owner: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """[M] int64 cache slots of logical ``slots`` [M] of the requests ``owner`` [M]."""
        blocks = block_table[owner, torch.div(slots, self.block_size, rounding_mode="floor")]
        return blocks.long() * self.block_size + slots % self.block_size

    def catch_up(
        self, rows: CatchUpRows, drafting: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the draft KV of final rows; returns (for logits, for feedback) hidden states
        at the last row of every request in ``drafting`` [A] int64, [A, H] each.

        A row that nobody drafts from needs its KV only, which is less than half the work.
        """
        last = rows.cu_rows[1:].long() - 1
        num_others = rows.token_ids.shape[0] - drafting.shape[0]
        hidden = self._combine(rows)
        if self.kv_writer is None or 0 < num_others < SPLIT_FROM and drafting.numel():
            for_logits, for_feedback = self.run_rows(rows, hidden)
            return for_logits[last[drafting]], for_feedback[last[drafting]]
        if num_others:
            others = torch.ones(rows.token_ids.shape[0], dtype=torch.bool)
            others[last[drafting]] = False
            self._write_kv(rows, hidden, others.nonzero().flatten())
        if not drafting.numel():
            return hidden[:0], hidden[:0]
        roots = last[drafting]
        only_roots = HeadRows(
            token_ids=rows.token_ids[roots],
            positions=rows.positions[roots],
            cu_rows=torch.arange(drafting.shape[0] + 1, dtype=torch.int32),
            block_table=rows.block_table[drafting],
        )
        return self.run_rows(only_roots, hidden[roots])

    def _combine(self, rows: CatchUpRows) -> torch.Tensor:
        """[M, H]: what the head takes for the hidden states of ``rows``."""
        parts = [
            self.model.combine_hidden_states(torch.cat([h[part] for h in rows.hidden_states], -1))
            for part in rows.step_rows.split(CHUNK)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _write_kv(self, rows: CatchUpRows, hidden: torch.Tensor, chosen: torch.Tensor) -> None:
        assert self.kv_writer is not None
        owner = torch.repeat_interleave(rows.cu_rows.diff().long())
        for part in chosen.split(CHUNK):
            positions = rows.positions[part]
            slots = self.slot_mapping(rows.block_table, owner[part], positions)
            self.kv_writer.write(rows.token_ids[part], positions, hidden[part], slots)

    def run_rows(self, rows: HeadRows, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole head over ``rows``, whose combined states are ``hidden`` [M, H]; returns
        (for logits, for feedback) of every row."""
        lens = rows.cu_rows.diff()
        owner = torch.repeat_interleave(lens.long())
        last = rows.cu_rows[1:].long() - 1
        seq_lens = (rows.positions[last] + 1).to(torch.int32)
        slots = self.slot_mapping(rows.block_table, owner, rows.positions)
        _, metadata = self.build_per_group_and_layer_attn_metadata(
            CommonAttentionMetadata(
                query_start_loc=rows.cu_rows,
                query_start_loc_cpu=rows.cu_rows,
                seq_lens=seq_lens,
                seq_lens_cpu_upper_bound=seq_lens,
                num_reqs=lens.shape[0],
                num_actual_tokens=owner.shape[0],
                max_query_len=int(lens.max()),
                max_seq_len=int(seq_lens.max()),
                block_table_tensor=rows.block_table,
                slot_mapping=slots,
                causal=True,
            )
        )
        return self._forward(rows.token_ids, rows.positions, hidden, metadata, slots)

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
            tree=TreeRows(None, cu_rows, context_lens, frontier.ancestors.flatten(0, 1), tables),
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
    """``vllm_echo.draft.DraftHead`` for one step, over R requests being drafted for."""

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
