# SPDX-License-Identifier: Apache-2.0
"""vLLM's V1 CPU runner with the stages of ECHO at its hook points.

A step, in the order of the methods below:

    _prepare_inputs                        pack: tree rows, depth positions
    _build_attention_metadata              ancestors to the target's layers
    _model_forward                         verify
    execute_model, after that              output layer
    rejection_sampler (TreeVerifier)       accept
    _update_states_after_model_execute     commit
    propose_draft_token_ids                catch-up, then draft, gate, schedule
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_echo.core.commit import commit_paths
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.draft import DraftHead
from vllm_echo.core.pack import pack_roots
from vllm_echo.core.pipeline import EchoPipeline, Proposal
from vllm_echo.core.policies import make_recording_policy
from vllm_echo.core.stats import StepStats
from vllm_echo.core.timing import StageTimer
from vllm_echo.core.trace import TraceRecorder
from vllm_echo.core.tree import CandidateTrees, SuperTree
from vllm_echo.core.trial import StepTimes
from vllm_echo.errors import EchoConfigError
from vllm_echo.integration.cpu.attention import (
    EchoCPUAttentionMetadataBuilder,
    require_tree_attention,
)
from vllm_echo.integration.cpu.drafter import CatchUpRows, EagleDraftHead, EchoDrafter
from vllm_echo.integration.cpu.planner import DraftPlan, Limits, plan_drafts
from vllm_echo.integration.cpu.rows import as_rows, final_rows
from vllm_echo.integration.cpu.slots import SlotPool
from vllm_echo.integration.cpu.standing import standing_of
from vllm_echo.integration.cpu.stops import PathOutputs
from vllm_echo.integration.cpu.verifier import StepInputs, TreeVerifier
from vllm_echo.integration.log import echo_logger
from vllm_echo.integration.silence import Silence

logger = echo_logger(__name__)


@dataclass
class Step:
    """What the stages of one step hand to each other through the runner."""

    tree: SuperTree
    root_positions: torch.Tensor
    """[R] int64, logical positions (and KV slots) of the roots."""
    proposal: Proposal | None = None
    """What it drafted; None for nothing, and while a trace is recorded."""


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
        self.recorder: TraceRecorder | None = None
        self._step: Step | None = None
        self._forward_ended: float | None = None
        """``perf_counter`` after this step's forward; None before it, and where there is none."""
        self._stats: StepStats | None = None
        self.target_layers: list[Attention] = []
        self.silence = Silence(speaks=get_tp_group().is_first_rank)
        self._settle_thinking_budgets()
        logger.info("ECHO on the V1 CPU runner: %s", config)

    def may_reinitialize_input_batch(self, kv_cache_config: KVCacheConfig) -> None:
        super().may_reinitialize_input_batch(kv_cache_config)
        self._settle_thinking_budgets()

    def _settle_thinking_budgets(self) -> None:
        """A batch's holder of them assumes chains where vLLM speculates; we draft nothing for its
        requests, and every request has one row there."""
        holder = self.input_batch.thinking_budget_state_holder
        if holder is not None:
            holder.in_spec_mode = False

    def set_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Change some of the options ``EchoConfig.to_dict`` has; raises EchoConfigError."""
        now = self.pipeline.config
        config = EchoConfig.from_dict({**now.to_dict(), **options})
        if config.num_speculative_tokens > self.num_spec_tokens:
            raise EchoConfigError(
                f"num_speculative_tokens: {config.num_speculative_tokens} is more than the "
                f"{self.num_spec_tokens} that this engine was started with; start it with more"
            )
        if self.recorder is not None:
            raise EchoConfigError(
                "echo: options cannot change while drafts are recorded; stop the recording first"
            )
        if config.needs_profile and config.profile is None:
            raise EchoConfigError(
                "echo.profile: is missing, and only a start measures one; give the one that "
                "`vllm-echo profile` writes, or a whole number for k_max and a policy but goodput"
            )
        self.pipeline.set_options(config)
        return config.to_dict()

    def start_recording(self) -> None:
        """Draft for everybody, verify nothing, and keep a trace; until ``stop_recording``."""
        policy = make_recording_policy(self.pipeline.config)
        self.pipeline.policy = policy
        self.recorder = TraceRecorder(policy.shape)

    def take_recording(self) -> bytes:
        """The trace since the last call, as ``DraftTrace.to_bytes`` writes it."""
        assert self.recorder is not None, "start_recording first"
        return self.recorder.take().to_bytes()

    def stop_recording(self) -> None:
        self.recorder = None
        self.pipeline.set_options(self.pipeline.config)

    def _record(
        self, drafted: torch.Tensor, candidates: CandidateTrees | None, roots: torch.Tensor
    ) -> None:
        """Keep a step's roots, also of requests that draft nothing any more."""
        assert self.recorder is not None
        place = {request: index for index, request in enumerate(drafted.tolist())}
        chosen = [
            (index, req_id, self.requests[req_id].output_token_ids)
            for index, req_id in enumerate(self.input_batch.req_ids)
            if not self.discard_request_mask.np[index]
        ]
        chosen = [entry for entry in chosen if entry[2]]
        self.recorder.add(
            keys=[req_id for _, req_id, _ in chosen],
            positions=[len(output) for _, _, output in chosen],
            contexts=[int(roots[index]) + 1 for index, _, _ in chosen],
            root_tokens=[output[-1] for _, _, output in chosen],
            candidates=candidates,
            places=[place.get(index, -1) for index, _, _ in chosen],
        )

    def load_model(self, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights)
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        for name, layer in layers.items():
            require_tree_attention(name, layer.impl)
        self.target_layers = [
            layer
            for name, layer in layers.items()
            if name not in self.drafter._draft_attn_layer_names
            # A layer that shares another's cache would move the same KV twice.
            and layer.kv_sharing_target_layer_name is None
        ]

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # vLLM's sampler is warmed up; the verifier calls it and has nothing else to warm.
        with patch.object(self, "speculative_config", None):
            return super()._dummy_sampler_run(hidden_states)

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
        scheduled, counts = as_rows([drafts.get(req_id, []) for req_id in req_ids])
        if counts.any():
            slots = self.slots.of(req_ids)
            # A tree needs all its rows, and its root first; anything else stays a chain.
            cut = num_scheduled_tokens != counts + 1
            if cut.any():
                self.pipeline.table.clear(slots[torch.from_numpy(cut)])
            tree = self.pipeline.pack_step(slots, scheduled, torch.from_numpy(counts))
        else:
            tree = pack_roots(len(req_ids), self.device)
        root_rows = self.query_start_loc.np[1 : len(req_ids) + 1] - counts - 1
        positions = self.positions.numpy()
        root_positions = positions[root_rows]
        if tree.num_nodes:
            shift = root_rows - tree.cu_rows.numpy()[:-1]
            rows = np.arange(tree.tokens.shape[0]) + np.repeat(shift, counts + 1)
            positions[rows] = np.repeat(root_positions, counts + 1) + tree.depths.numpy()
        self._step = Step(tree, torch.from_numpy(root_positions))
        self.rejection_sampler.begin_step(
            StepInputs(
                tree=tree,
                outputs=PathOutputs(
                    [self.requests[req_id] for req_id in req_ids], self.max_model_len
                ),
                discarded=torch.from_numpy(self.discard_request_mask.np[: len(req_ids)]),
            )
        )
        self.timer.count("verified_nodes", tree.num_nodes)
        self.timer.count("rows", int(num_scheduled_tokens.sum()))

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

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self._forward_ended = None
        output = super().execute_model(*args, **kwargs)
        if self._forward_ended is not None:
            # Nothing else of weight comes between: the target's logits, one row a tree row.
            self.timer.since("output_layer", self._forward_ended)
        return output

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.timer.stage("verify"):
            output = super()._model_forward(*args, **kwargs)
        self._forward_ended = time.perf_counter()
        return output

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

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        output = super().sample_tokens(grammar_output)
        if self._stats is not None:
            output.echo, self._stats = self._stats.to_dict(), None
        return output

    # -- commit -------------------------------------------------------------------------

    def _update_states_after_model_execute(
        self, output_token_ids: torch.Tensor, scheduler_output: SchedulerOutput
    ) -> None:
        super()._update_states_after_model_execute(output_token_ids, scheduler_output)
        if self.step.tree.num_nodes == 0:
            return
        with self.timer.stage("commit"):
            commit_paths(
                [layer.kv_cache for layer in self.target_layers],
                self._block_table(),
                self.step.root_positions.to(torch.int32),
                self.rejection_sampler.paths,
            )

    def _block_table(self) -> torch.Tensor:
        """[R, B] int32 of the batch."""
        return self.input_batch.block_table[0].get_device_tensor(self.input_batch.num_reqs)

    # -- draft, gate, schedule ----------------------------------------------------------

    def _input_fits_in_drafter(self, common_attn_metadata: CommonAttentionMetadata | None) -> bool:
        # Room is decided per request (planner.py): one near its limit stops no other.
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
            rows = self._catch_up_rows(
                next_tokens,
                aux_hidden_states or [hidden_states],
                common_attn_metadata.slot_mapping,
            )
            roots = rows.positions[rows.cu_rows[1:].long() - 1]
            plan = self._plan(roots.numpy())
            for_logits, for_feedback = self.drafter.catch_up(rows, plan.requests)
        with self.timer.stage("draft"):
            drafts = self._propose(plan, for_logits, for_feedback, roots)
        with self.timer.stage("stats"):
            self._stats = StepStats.of_step(
                self.step.tree,
                self.rejection_sampler.paths,
                self.step.proposal,
                plan.undrafted,
            )
            self.silence.see(self._stats)
        self.timer.count("output_tokens", sum(map(len, sampled_token_ids)))
        self.timer.count("requests", len(sampled_token_ids))
        self.timer.count("context_tokens", plan.load.num_context_tokens)
        self.timer.count("continuing", scheduler_output.scheduled_cached_reqs.num_reqs)
        self._watch_costs(self.timer.end_step())
        return drafts

    def _plan(self, roots: np.ndarray) -> DraftPlan:
        """``roots`` [R] int64: last final positions."""
        req_ids = self.input_batch.req_ids
        standing = standing_of(
            [self.requests[req_id] for req_id in req_ids],
            roots,
            self.discard_request_mask.np[: len(req_ids)],
            self.max_model_len,
            num_absent=len(self.requests) - len(req_ids),
        )
        limits = Limits(
            max_nodes=self.pipeline.config.num_speculative_tokens,
            max_model_len=self.max_model_len,
            head_context=self.effective_drafter_max_model_len,
            max_requests=self.max_num_reqs,
        )
        if self.recorder is None:  # what is recorded is never verified
            limits = replace(limits, max_rows=self.scheduler_config.max_num_scheduled_tokens)
        return plan_drafts(standing, limits, self.pipeline)

    def _watch_costs(self, record: dict[str, Any]) -> None:
        """Feed the step's times to what corrects the cost curve. Times are this rank's, so rank 0
        judges, and what it finds travels."""
        watch = self.pipeline.watch
        if watch is None or self.recorder is not None:
            return
        watch.add(StepTimes.of_record(record))
        if watch.due:
            group = get_tp_group()
            first = group.rank_in_group == 0
            verdict = group.broadcast_object(watch.judge() if first else None)
            for message in watch.apply(verdict):
                if first:
                    logger.warning(message)

    def _catch_up_rows(
        self,
        next_tokens: torch.Tensor,
        hidden: list[torch.Tensor],
        written: torch.Tensor,
    ) -> CatchUpRows:
        """The rows that became final: everything up to the root, then the accepted path.
        ``written`` [rows of the step] int64 are the slots that the target wrote."""
        tree = self.step.tree
        bounds = self.query_start_loc.np[: tree.num_requests + 1]
        rows, places, ends = final_rows(bounds, tree, self.rejection_sampler.paths)
        token_ids = np.empty(rows.shape[0], dtype=np.int32)
        token_ids[:-1] = self.input_ids.np[rows[1:]]
        token_ids[ends - 1] = next_tokens.numpy()
        cu_rows = np.zeros(ends.shape[0] + 1, dtype=np.int32)
        cu_rows[1:] = ends
        return CatchUpRows(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(self.positions.numpy()[rows]),
            slots=torch.from_numpy(written.numpy()[places]),
            step_rows=torch.from_numpy(rows),
            hidden_states=hidden,
            cu_rows=torch.from_numpy(cu_rows),
            block_table=self._block_table(),
        )

    def _propose(
        self,
        plan: DraftPlan,
        for_logits: torch.Tensor,
        for_feedback: torch.Tensor,
        roots: torch.Tensor,
    ) -> list[list[int]]:
        req_ids = self.input_batch.req_ids
        drafts: list[list[int]] = [[] for _ in req_ids]
        if plan.requests.shape[0] == 0:
            if self.recorder is not None:
                self._record(plan.requests, None, roots)
            return drafts
        slots = self.slots.of(req_ids)
        self.pipeline.table.clear(slots)
        head = self._draft_head(plan.requests, for_logits, for_feedback, roots[plan.requests])
        proposal = self.pipeline.propose_trees(
            head, plan.batch, slots[plan.requests], plan.offer, plan.load
        )
        self.timer.count("drafted_requests", plan.requests.shape[0])
        self.timer.count("layers", proposal.growth.num_forwards)
        self.timer.count("frontier_nodes", proposal.growth.num_expanded)
        trees = proposal.trees
        if self.recorder is not None:
            self._record(plan.requests, proposal.candidates, roots)
        else:
            self.step.proposal = proposal
        for request, tokens, count in zip(
            plan.requests.tolist(), trees.tokens.tolist(), trees.num_nodes.tolist(), strict=True
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
