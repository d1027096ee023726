# SPDX-License-Identifier: Apache-2.0
"""Acceptance with vLLM's own sampler: each visited row is sampled exactly as plain
decoding would sample it, with the history that its own path gives it."""

from dataclasses import dataclass, replace

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_echo.core.accept import accept_greedy, end_paths, walk_paths
from vllm_echo.core.tree import AcceptedPaths, SuperTree
from vllm_echo.integration.cpu.stops import PathOutputs


@dataclass
class StepInputs:
    """What a step's acceptance needs beside logits; laid down by the runner."""

    tree: SuperTree
    outputs: PathOutputs
    """Of the batch's requests: what penalties and processors read, and where a request ends."""
    discarded: torch.Tensor
    """[R] bool, prefill goes on: the sample is thrown away and must draw no randomness."""


class TreeVerifier(torch.nn.Module):
    """Stands where vLLM keeps its rejection sampler, with the same call."""

    def __init__(self, sampler: Sampler):
        super().__init__()
        self.sampler = sampler
        self._step: StepInputs | None = None
        self._paths: AcceptedPaths | None = None

    def begin_step(self, step: StepInputs) -> None:
        """Say what the next ``forward`` verifies."""
        self._step = step

    @property
    def paths(self) -> AcceptedPaths:
        """What the last ``forward`` accepted."""
        assert self._paths is not None, "nothing has been verified"
        return self._paths

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """``logits`` [T, V]: roots and nodes, request-major, of the step that the runner has laid
        down. Leaves the accepted paths in ``self.paths``."""
        step, self._step = self._step, None
        assert step is not None, "begin_step first"
        if _is_argmax_only(sampling_metadata):
            # Ties go to the lowest id here as in vLLM's sampler, and bf16 to fp32 keeps order.
            with step.outputs as outputs:
                self._paths = end_paths(accept_greedy(step.tree, logits), outputs.ends_with)
            return SamplerOutput(sampled_token_ids=self.paths.tokens, logprobs_tensors=None)
        if step.tree.num_nodes == 0:
            return self._sample_roots(step, logits, sampling_metadata)
        walk = _SamplerWalk(self.sampler, sampling_metadata, step, logits)
        with step.outputs as outputs:
            self._paths = walk_paths(step.tree, walk.sample, outputs.ends_with)
        return SamplerOutput(self.paths.tokens, walk.logprobs(self.paths))

    def _sample_roots(
        self, step: StepInputs, logits: torch.Tensor, metadata: SamplingMetadata
    ) -> SamplerOutput:
        """A step without candidates is a plain one: nobody walks."""
        discarded = set(step.discarded.nonzero().flatten().tolist())
        output = self.sampler(logits, without_generators(metadata, discarded))
        tokens = output.sampled_token_ids
        self._paths = AcceptedPaths(
            tokens, tokens.new_empty(tokens.shape[0], 0), tokens.new_zeros(tokens.shape[0])
        )
        return output


class _SamplerWalk:
    """Calls vLLM's sampler level by level for the requests that still walk."""

    def __init__(
        self, sampler: Sampler, metadata: SamplingMetadata, step: StepInputs, logits: torch.Tensor
    ):
        self._sampler = sampler
        self._metadata = metadata
        self._logits = logits
        self._root_rows = step.tree.cu_rows[:-1].long()
        # Processors keep state by batch row, and logprob_token_ids gives every row of a batch
        # the width of its longest list: both want the same batch at every level.
        self._keep_batch = _processors_active(metadata.logitsprocs) or bool(
            metadata.logprob_token_ids
        )
        self._discarded = set(step.discarded.nonzero().flatten().tolist())
        self._levels: list[tuple[torch.Tensor, LogprobsTensors | None]] = []

    def sample(self, requests: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``vllm_echo.core.accept.SampleRows``: one draw for each request in ``requests``."""
        first = not self._levels
        if first:
            output = self._sampler(
                self._logits[rows], without_generators(self._metadata, self._discarded)
            )
        elif self._keep_batch:
            output = self._sample_in_batch(requests, rows)
        else:
            output = self._sampler(
                self._logits[rows], select_requests(self._metadata, requests.tolist())
            )
        self._levels.append((requests, output.logprobs_tensors))
        return output.sampled_token_ids.flatten()

    def _sample_in_batch(self, requests: torch.Tensor, rows: torch.Tensor) -> SamplerOutput:
        """Every row takes part; the rows of requests that have stopped are sampled from their
        root again and ignored."""
        for processor in self._metadata.logitsprocs.all:
            processor.update_state(None)
        all_rows = self._root_rows.clone()
        all_rows[requests] = rows
        others = set(range(self._root_rows.shape[0])).difference(requests.tolist())
        metadata = without_generators(self._metadata, others)
        # A request with a thinking budget is never drafted for, so it walked at its root only.
        metadata = replace(metadata, thinking_budget_state_holder=None)
        output = self._sampler(self._logits[all_rows], metadata)
        return SamplerOutput(
            output.sampled_token_ids[requests], _rows_of(output.logprobs_tensors, requests)
        )

    def logprobs(self, paths: AcceptedPaths) -> LogprobsTensors | None:
        """Log-probabilities by path: [R * (L + 1)] rows, request-major, as vLLM's
        ``parse_output`` reads them; rows of padding are never looked at."""
        if self._levels[0][1] is None:
            return None
        num_requests, num_columns = paths.tokens.shape
        fields = []
        for name in LogprobsTensors._fields:
            first = getattr(self._levels[0][1], name)
            if first is None or first.numel() == 0:
                fields.append(first)
                continue
            full = first.new_zeros(num_requests, num_columns, *first.shape[1:])
            for column, (requests, level) in enumerate(self._levels):
                full[requests, column] = getattr(level, name)
            fields.append(full.flatten(0, 1))
        return LogprobsTensors(*fields)


def _rows_of(tensors: LogprobsTensors | None, rows: torch.Tensor) -> LogprobsTensors | None:
    if tensors is None:
        return None
    return LogprobsTensors(*(t if t is None or t.numel() == 0 else t[rows] for t in tensors))


def _is_argmax_only(metadata: SamplingMetadata) -> bool:
    """Plain greedy, nothing that reads or changes logits on the way."""
    return (
        metadata.all_greedy
        and metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and metadata.no_penalties
        and not metadata.bad_words_token_ids
        and metadata.allowed_token_ids_mask is None
        and not _processors_active(metadata.logitsprocs)
        and not _budget_active(metadata)
    )


def _budget_active(metadata: SamplingMetadata) -> bool:
    holder = metadata.thinking_budget_state_holder
    return holder is not None and holder.has_tracked_requests()


def _processors_active(processors: LogitsProcessors) -> bool:
    """Whether any logits processor would touch this batch (custom ones always may)."""
    for processor in processors.all:
        if isinstance(processor, MinPLogitsProcessor):
            active = processor.min_p_count > 0
        elif isinstance(processor, LogitBiasLogitsProcessor):
            active = bool(processor.biases)
        elif isinstance(processor, MinTokensLogitsProcessor):
            active = bool(processor.min_toks)
        else:
            active = True
        if active:
            return True
    return False


def without_generators(metadata: SamplingMetadata, requests: set[int]) -> SamplingMetadata:
    """The metadata with the seeded generators of ``requests`` left out, which then stay as they
    are."""
    if requests.isdisjoint(metadata.generators):
        return metadata
    kept = {r: g for r, g in metadata.generators.items() if r not in requests}
    return replace(metadata, generators=kept)


def select_requests(metadata: SamplingMetadata, requests: list[int]) -> SamplingMetadata:
    """The metadata of some requests of a batch that has neither active logits processors nor
    ``logprob_token_ids``."""

    def rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[requests]

    def renumbered(by_request: dict) -> dict:
        return {i: by_request[r] for i, r in enumerate(requests) if r in by_request}

    def items(values: list | None) -> list | None:
        return [values[r] for r in requests] if values else values

    return replace(
        metadata,
        temperature=rows(metadata.temperature),
        top_p=rows(metadata.top_p),
        top_k=rows(metadata.top_k),
        generators=renumbered(metadata.generators),
        prompt_token_ids=rows(metadata.prompt_token_ids),
        frequency_penalties=rows(metadata.frequency_penalties),
        presence_penalties=rows(metadata.presence_penalties),
        repetition_penalties=rows(metadata.repetition_penalties),
        output_token_ids=items(metadata.output_token_ids),
        allowed_token_ids_mask=rows(metadata.allowed_token_ids_mask),
        bad_words_token_ids=renumbered(metadata.bad_words_token_ids),
        spec_token_ids=items(metadata.spec_token_ids),
        logitsprocs=LogitsProcessors(),
        thinking_budget_state_holder=None,
    )
