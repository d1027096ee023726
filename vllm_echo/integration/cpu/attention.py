# SPDX-License-Identifier: Apache-2.0
"""Tree attention in vLLM's CPU backend: each row of a step goes to exactly one of two kernels.

Decoding rows go to ours, candidates or not: it is the faster one for them (docs/measurements.md).
Prompts go to vLLM's. The batch is ordered so that decoding requests come first, and each kernel
finds its rows side by side: to gather them and to spread the results again, in every layer, would
cost what the faster kernel saves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_echo import ops
from vllm_echo.core.tree import SuperTree
from vllm_echo.errors import EchoError

READABLE_ISAS = ("vec", "vec16")
"""vLLM's cache layouts that our kernels read; other instruction sets pack it differently."""


MAX_HEAD_SIZE = 256
"""Of ``ops.tree_attention``."""


Rows = slice | torch.Tensor
"""Some of a step's rows: side by side, or [M] int64 indices."""


@dataclass
class TreeRows:
    """Rows of the super-tree, which attend through an ancestor mask: M rows of P requests."""

    rows: Rows
    """Where they lie in the step."""
    cu_rows: torch.Tensor
    """[P + 1] int32."""
    context_lens: torch.Tensor
    """[P] int32, leading KV slots that every row attends to."""
    ancestors: torch.Tensor
    """[M, W] int64, bit j: KV slot context_len + j."""
    block_table: torch.Tensor
    """[P, B] int32."""


@dataclass
class CausalRows:
    """Rows of prompts, for vLLM's kernel."""

    rows: Rows
    """Where they lie in the step."""
    metadata: CPUAttentionMetadata


@dataclass(kw_only=True)
class EchoAttentionMetadata(CPUAttentionMetadata):
    """Some of a step's rows, or all, are those of the super-tree."""

    tree: TreeRows
    causal: CausalRows | None = None


class EchoCPUAttentionImpl(CPUAttentionBackendImpl):
    """Sends tree rows to ``ops.tree_attention`` and leaves the rest to vLLM."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not isinstance(attn_metadata, EchoAttentionMetadata):
            return super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        causal = attn_metadata.causal
        if causal is not None:
            with _written_to(output, causal.rows) as part:
                super().forward(
                    layer, query[causal.rows], key, value, kv_cache, causal.metadata, part
                )
        self.attend_tree(query, kv_cache, attn_metadata.tree, output)
        return output

    def attend_tree(
        self, query: torch.Tensor, kv_cache: torch.Tensor, tree: TreeRows, output: torch.Tensor
    ) -> None:
        key_cache, value_cache = split_kv_cache(kv_cache)
        with _written_to(output, tree.rows) as part:
            ops.tree_attention(
                query[tree.rows],
                key_cache,
                value_cache,
                tree.block_table,
                tree.cu_rows,
                tree.context_lens,
                tree.ancestors,
                self.scale,
                self.logits_soft_cap,
                part,
            )


@contextmanager
def _written_to(output: torch.Tensor, rows: Rows) -> Iterator[torch.Tensor]:
    """A tensor for the results of ``rows``, which are those rows of ``output`` afterwards."""
    if isinstance(rows, slice):
        yield output[rows]
        return
    part = torch.empty_like(output[: rows.shape[0]])
    yield part
    output[rows] = part


def require_tree_attention(name: str, impl: object) -> None:
    """Raise EchoError unless the layer ``name`` attends as trees need: no silent fallback."""
    if not isinstance(impl, EchoCPUAttentionImpl):
        raise EchoError(
            f"layer {name} attends through {type(impl).__name__}, which knows no trees; echo "
            "needs the CPU_ATTN backend: remove --attention-backend"
        )
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if impl.head_size > MAX_HEAD_SIZE or impl.head_size not in supported:
        raise EchoError(
            f"layer {name} has heads of {impl.head_size} values; echo on a CPU serves "
            f"{[size for size in supported if size <= MAX_HEAD_SIZE]}"
        )
    features = {
        "a sliding window": impl.sliding_window != -1,
        "ALiBi": impl.alibi_slopes is not None,
        "attention sinks": impl.sinks is not None,
        "an 8-bit KV cache": impl.is_fp8_kv_cache,
    }
    used = [feature for feature, is_used in features.items() if is_used]
    if used:
        raise EchoError(
            f"layer {name} uses {' and '.join(used)}, which echo's tree attention does not "
            "support; serve this model without echo"
        )


def split_kv_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks, kv heads, block, 2 * head] -> the key and value views that kernels take."""
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    key_cache, value_cache = kv_cache.view(num_blocks, num_kv_heads, 2 * block_size, -1).chunk(
        2, dim=2
    )
    return key_cache, value_cache


class EchoCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """vLLM's builder, plus the super-tree that the runner lays here before a step."""

    isa: str

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.super_tree: SuperTree | None = None
        # Requests with no more rows than a root and its candidates come first in a batch.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        if self.isa not in READABLE_ISAS:
            self.isa = "vec" if self.block_size % 32 == 0 else "vec16"
            self._set_isa_to_layers(layer_names)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        tree = self.super_tree
        if tree is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        in_tree = common_attn_metadata.query_start_loc.diff() == tree.cu_rows.diff()
        if not bool(in_tree.any()):
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        return self._build_tree(common_attn_metadata, tree, in_tree)

    def _build_tree(
        self, common: CommonAttentionMetadata, tree: SuperTree, in_tree: torch.Tensor
    ) -> EchoAttentionMetadata:
        """``in_tree`` [R] bool: whose rows are those of its tree; the others' are prompts."""
        lens = tree.cu_rows.diff()
        rows = TreeRows(
            rows=slice(0, common.num_actual_tokens),
            cu_rows=tree.cu_rows,
            context_lens=common.seq_lens - lens,
            ancestors=tree.ancestors,
            block_table=common.block_table_tensor,
        )
        causal = None
        if not bool(in_tree.all()):
            owner = torch.repeat_interleave(common.query_start_loc.diff().long())
            causal = CausalRows(
                _rows_of(~in_tree[owner]), super().build(0, _only_requests(common, ~in_tree))
            )
            rows = TreeRows(
                rows=_rows_of(in_tree[owner]),
                cu_rows=_prefix_sums(lens[in_tree]),
                context_lens=rows.context_lens[in_tree],
                ancestors=tree.ancestors[in_tree[torch.repeat_interleave(lens.long())]],
                block_table=common.block_table_tensor[in_tree],
            )
        return EchoAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            tree=rows,
            causal=causal,
        )


def _rows_of(chosen: torch.Tensor) -> Rows:
    """The rows in ``chosen`` [T] bool, at least one."""
    rows = chosen.nonzero().flatten()
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last + 1 - first == rows.shape[0] else rows


def _prefix_sums(lens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)


def _only_requests(common: CommonAttentionMetadata, keep: torch.Tensor) -> CommonAttentionMetadata:
    """The metadata of the requests in ``keep`` [R] bool, their rows moved together."""
    requests = keep.nonzero().flatten()
    lens = common.query_start_loc.diff()[requests]
    cu_rows = _prefix_sums(lens)
    return replace(
        common,
        query_start_loc=cu_rows,
        query_start_loc_cpu=cu_rows,
        seq_lens=common.seq_lens[requests],
        num_reqs=requests.shape[0],
        num_actual_tokens=int(cu_rows[-1]),
        max_query_len=int(lens.max()),
        block_table_tensor=common.block_table_tensor[requests],
    )


class EchoCPUAttentionBackend(CPUAttentionBackend):
    """Registered in CPU_ATTN's place by the echo worker, in its own process only."""

    @staticmethod
    def get_impl_cls() -> type[EchoCPUAttentionImpl]:
        return EchoCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[EchoCPUAttentionMetadataBuilder]:
        return EchoCPUAttentionMetadataBuilder
