# SPDX-License-Identifier: Apache-2.0
"""vLLM's V1 CPU runner with the stages of ECHO at its hook points.

A step, in the order of the methods below:

    _prepare_inputs                        pack: tree rows, depth positions
    _build_attention_metadata              ancestors to the target's layers
    _model_forward                         verify
    rejection_sampler (TreeVerifier)       accept
    _update_states_after_model_execute     commit
    propose_draft_token_ids                catch-up, then draft, gate, schedule
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_echo.commit import commit_paths
from vllm_echo.config import EchoConfig
from vllm_echo.draft import DraftBatch, DraftHead
from vllm_echo.integration.cpu.attention import (
    EchoCPUAttentionMetadataBuilder,
    require_tree_attention,
)
from vllm_echo.integration.cpu.drafter import CatchUpRows, EagleDraftHead, EchoDrafter
from vllm_echo.integration.cpu.slots import SlotPool
from vllm_echo.integration.cpu.verifier import StepInputs, TreeVerifier
from vllm_echo.pipeline import EchoPipeline
from vllm_echo.timing import StageTimer
from vllm_echo.tree import SuperTree

logger = init_logger(__name__)


@dataclass
class Step:
    """What the stages of one step hand to each other through the runner."""

    tree: SuperTree
    root_positions: torch.Tensor
    """[R] int64, logical positions (and KV slots) of the roots."""


class EchoCPUModelRunner(CPUModelRunner):
    """Overrides hook points only; the body of a step stays vLLM's."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        config = EchoConfig.from_dict(self.speculative_config.echo)
        self.pipeline = EchoPipeline(config, self.max_num_reqs, device)
        self.slots = SlotPool(self.pipeline.table)
        self.drafter = EchoDrafter(vllm_config, device, self)
        self.rejection_sampler = TreeVerifier(self.sampler)
        self.timer = StageTimer.from_environment()
        self._step: Step | None = None
        holder = self.input_batch.thinking_budget_state_holder
        if holder is not None:
            # Its speculative mode assumes chains; we draft nothing for its requests.
            holder.in_spec_mode = False
        logger.info("ECHO on the V1 CPU runner: %s", config)

    def load_model(self, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights)
        for name, layer in get_layers_from_vllm_config(self.vllm_config, Attention).items():
            require_tree_attention(name, layer.impl)

    @property
    def step(self) -> Step:
        """The step in progress, from ``_prepare_inputs`` to the end of drafting."""
        assert self._step is not None, "no step has been prepared"
        return self._step

    # -- pack ---------------------------------------------------------------------------

    def _on_request_state_removed(self, req_id: str, req_state: object) -> None:
        super()._on_request_state_removed(req_id, req_state)
        self.slots.release(req_id)

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> tuple[torch.Tensor, SpecDecodeMetadata | None, int]:
        inputs = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        with self.timer.stage("pack"):
            self._pack(scheduler_output.scheduled_spec_decode_tokens, num_scheduled_tokens)
        return inputs

    def _pack(self, drafts: dict[str, list[int]], num_scheduled_tokens: np.ndarray) -> None:
        """Lay out this step's super-tree, and give its rows rope positions by depth.

        vLLM has computed cache slots from linear positions by now, and that is right:
        slot = root slot + row, position = root position + depth.
        """
        req_ids = self.input_batch.req_ids
        slots = self.slots.of(req_ids)
        scheduled, counts = _as_rows([drafts.get(req_id, []) for req_id in req_ids])
        # A tree needs all its rows, and its root first; anything else stays a chain.
        whole = torch.from_numpy(num_scheduled_tokens.astype(np.int32)) == counts + 1
        self.pipeline.table.clear(slots[~whole])
        tree = self.pipeline.pack_step(slots, scheduled, counts)
        starts = self.query_start_loc.cpu[1 : len(req_ids) + 1] - tree.cu_rows.diff()
        owner = torch.repeat_interleave(tree.cu_rows.diff().long())
        local = torch.arange(owner.shape[0]) - tree.cu_rows[owner].long()
        rows = starts.long()[owner] + local
        root_positions = self.positions[starts.long()].clone()
        self.positions[rows] = root_positions[owner] + tree.depths
        self._step = Step(tree, root_positions)
        self.rejection_sampler.begin_step(
            StepInputs(
                tree=tree,
                histories=self.input_batch.req_output_token_ids,
                discarded=torch.from_numpy(self.discard_request_mask.np[: len(req_ids)]),
            )
        )
        self.timer.count("verified_nodes", int(counts.sum()))

    # -- verify -------------------------------------------------------------------------

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        builders = [
            builder
            for groups in self.attn_groups
            for group in groups
            for builder in group.metadata_builders
            if isinstance(builder, EchoCPUAttentionMetadataBuilder)
        ]
        for builder in builders:
            builder.super_tree = self.step.tree
        try:
            return super()._build_attention_metadata(*args, **kwargs)
        finally:
            for builder in builders:
                builder.super_tree = None

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.timer.stage("verify"):
            return super()._model_forward(*args, **kwargs)

    def _sample(
        self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        with self.timer.stage("accept"):
            return super()._sample(logits, spec_decode_metadata)

    @contextmanager
    def _discarded_generators_hidden(self) -> Iterator[None]:
        """vLLM rewinds the generator of a request whose prefill goes on, which a CPU
        generator cannot do; ours was never advanced (``StepInputs.discarded``)."""
        generators = self.input_batch.generators
        discarded = self.discard_request_mask.np
        self.input_batch.generators = {i: g for i, g in generators.items() if not discarded[i]}
        try:
            yield
        finally:
            self.input_batch.generators = generators

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        with self._discarded_generators_hidden():
            return super()._bookkeeping_sync(*args, **kwargs)

    # -- commit -------------------------------------------------------------------------

    def _update_states_after_model_execute(
        self, output_token_ids: torch.Tensor, scheduler_output: SchedulerOutput
    ) -> None:
        super()._update_states_after_model_execute(output_token_ids, scheduler_output)
        with self.timer.stage("commit"):
            commit_paths(
                self._target_kv_caches(),
                self._block_table(),
                self.step.root_positions.to(torch.int32),
                self.rejection_sampler.paths,
            )

    def _target_kv_caches(self) -> list[torch.Tensor]:
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        return [
            layer.kv_cache
            for name, layer in layers.items()
            if name not in self.drafter._draft_attn_layer_names
            # A layer that shares another's cache would move the same KV twice.
            and layer.kv_sharing_target_layer_name is None
        ]

    def _block_table(self) -> torch.Tensor:
        """[R, B] int32 of the batch."""
        return self.input_batch.block_table[0].get_device_tensor(self.input_batch.num_reqs)

    # -- draft, gate, schedule ----------------------------------------------------------

    def _input_fits_in_drafter(self, common_attn_metadata: CommonAttentionMetadata | None) -> bool:
        # Room is decided per request (_draft_batch): one near its limit stops no other.
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: list[list[int]],
        sampling_metadata: SamplingMetadata,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: SpecDecodeMetadata | None,
        common_attn_metadata: CommonAttentionMetadata,
        slot_mappings: Any,
    ) -> list[list[int]]:
        with self.timer.stage("catch_up"):
            next_tokens = self.drafter.prepare_next_token_ids_cpu(
                sampled_token_ids,
                self.requests,
                self.input_batch,
                scheduler_output.num_scheduled_tokens,
            )
            rows = self._catch_up_rows(next_tokens, aux_hidden_states or [hidden_states])
            for_logits, for_feedback = self.drafter.catch_up(rows)
        with self.timer.stage("draft"):
            roots = rows.positions[rows.cu_rows[1:].long() - 1]
            drafts = self._propose(for_logits, for_feedback, roots)
        self.timer.count("output_tokens", sum(map(len, sampled_token_ids)))
        self.timer.count("requests", len(sampled_token_ids))
        self.timer.end_step()
        return drafts

    def _catch_up_rows(self, next_tokens: torch.Tensor, hidden: list[torch.Tensor]) -> CatchUpRows:
        """The rows that became final: everything up to the root, then the accepted path."""
        tree, paths = self.step.tree, self.rejection_sampler.paths
        starts = self.query_start_loc.cpu[: tree.num_requests].long()
        num_linear = self.query_start_loc.cpu[1 : tree.num_requests + 1].long() - starts
        num_linear -= tree.cu_rows.diff() - 1
        lens = num_linear + paths.num_accepted
        cu_rows = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)
        owner = torch.repeat_interleave(lens)
        local = torch.arange(owner.shape[0]) - cu_rows[owner].long()
        on_path = local - num_linear[owner]
        if paths.rows.shape[1]:
            path_row = paths.rows[owner, on_path.clamp(min=0, max=paths.rows.shape[1] - 1)].long()
            local = torch.where(on_path >= 0, num_linear[owner] - 1 + path_row, local)
        rows = starts[owner] + local
        token_ids = self.input_ids.cpu[rows].roll(-1)
        token_ids[cu_rows[1:].long() - 1] = next_tokens
        return CatchUpRows(
            token_ids=token_ids,
            positions=self.positions[rows],
            hidden_states=torch.cat([h[rows] for h in hidden], dim=-1),
            cu_rows=cu_rows,
            block_table=self._block_table(),
        )

    def _propose(
        self, for_logits: torch.Tensor, for_feedback: torch.Tensor, roots: torch.Tensor
    ) -> list[list[int]]:
        req_ids = self.input_batch.req_ids
        slots = self.slots.of(req_ids)
        self.pipeline.table.clear(slots)
        batch = self._draft_batch(roots)
        open_requests = (batch.max_nodes > 0).nonzero().flatten()
        drafts: list[list[int]] = [[] for _ in req_ids]
        if open_requests.numel() == 0:
            return drafts
        head = self._draft_head(
            open_requests,
            for_logits[open_requests],
            for_feedback[open_requests],
            roots[open_requests],
        )
        batch = DraftBatch(
            batch.max_nodes[open_requests],
            batch.can_expand[open_requests],
            batch.chain_only[open_requests],
        )
        trees = self.pipeline.propose_trees(head, batch, slots[open_requests])
        for request, tokens, count in zip(
            open_requests.tolist(), trees.tokens.tolist(), trees.num_nodes.tolist(), strict=True
        ):
            drafts[request] = tokens[:count]
        return drafts

    def _draft_head(
        self,
        requests: torch.Tensor,
        for_logits: torch.Tensor,
        for_feedback: torch.Tensor,
        roots: torch.Tensor,
    ) -> DraftHead:
        """The draft model of one step for the batch rows ``requests`` [A] int64. The other
        tensors are theirs already."""
        return EagleDraftHead(
            self.drafter, for_logits, for_feedback, roots, self._block_table()[requests]
        )

    def _draft_batch(self, roots: torch.Tensor) -> DraftBatch:
        """What each request may have. ``roots`` [R] int64: last final positions; the next
        step's root is one further, its nodes' slots follow."""
        params = [self.requests[req_id].sampling_params for req_id in self.input_batch.req_ids]
        room = self.max_model_len - 3 - roots
        max_nodes = room.clamp(min=0, max=self.num_spec_tokens)
        draftable = [self._is_draftable(i, p) for i, p in enumerate(params)]
        fits = roots + 1 + self.pipeline.policy.num_draft_slots <= self.max_model_len
        in_draft_range = roots + 2 + self.num_spec_tokens <= self.effective_drafter_max_model_len
        max_nodes = max_nodes * torch.tensor(draftable) * in_draft_range
        chain_only = [p.structured_outputs is not None for p in params]
        return DraftBatch(max_nodes.to(torch.int32), fits, torch.tensor(chain_only))

    def _is_draftable(self, index: int, params: SamplingParams) -> bool:
        """Not in the middle of its prefill, not at its end, no thinking budget."""
        if self.discard_request_mask.np[index] or params.thinking_token_budget is not None:
            return False
        output = self.requests[self.input_batch.req_ids[index]].output_token_ids
        if not output:
            return False  # nothing could be sampled: logits that are no numbers
        stopped = len(output) >= params.min_tokens and output[-1] in params.all_stop_token_ids
        at_last_token = params.max_tokens is not None and len(output) + 1 >= params.max_tokens
        return not (stopped or at_last_token)


def _as_rows(drafts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged lists -> [R, N] int32, -1 padded (N at least 1), and lengths [R] int32."""
    counts = [len(draft) for draft in drafts]
    rows = np.full((len(drafts), max(1, *counts)), -1, dtype=np.int32)
    for row, draft in zip(rows, drafts, strict=True):
        row[: len(draft)] = draft
    return torch.from_numpy(rows), torch.tensor(counts, dtype=torch.int32)
