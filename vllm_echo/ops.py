# SPDX-License-Identifier: Apache-2.0
"""Typed wrappers over the compiled operators (csrc/), checked at the door.

Words used below:

- R requests, T rows of all requests together, request-major; row 0 of a request is the root of
  its tree, the other rows are its nodes. Row indices inside a request are *local*.
- A *slot* is a logical KV position of a request (0 = its first token); row i of a tree sits at
  slot root + i. The block table maps logical block ``slot // block_size`` to a physical block.
- The CPU cache layout of vLLM 0.32 (attention isa ``vec`` and ``vec16``): a layer's raw cache is
  [num_blocks, num_kv_heads, block_size, 2 * head_size]. Per block and head it holds the keys as
  [head_size, block_size] (dim-major) and then the values as [block_size, head_size], for all
  dtypes alike. The isa ``amx`` packs differently and is not supported.

Every operator checks all its arguments before it writes anything: a wrong dtype, shape or value
(a block number outside the cache, say) raises ValueError, a wrong device TypeError; the message
names the tensor. Nothing is ever read or written out of bounds. The checks are in C++, where they
cost little even at one call a layer, and hold for direct calls of ``torch.ops.vllm_echo`` too.
"""

import importlib
from typing import NoReturn

import torch

try:
    importlib.import_module("vllm_echo._C")  # loading it registers torch.ops.vllm_echo
except ImportError as error:
    raise ImportError(
        "vllm_echo's compiled operators are missing or do not load into this PyTorch "
        f"({torch.__version__}): {error}. Build them with `make build`, or with "
        "`pip install -e . --no-deps --no-build-isolation` in the source tree."
    ) from error


def tree_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_rows: torch.Tensor,
    context_lens: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of tree rows over the paged CPU cache; returns ``out``.

    A row attends to slots 0 .. context_lens[r] - 1 of its request r and, beyond them, to slot
    context_lens[r] + j for each set bit j of its mask. A row that sees no slot gives zeros.
    Softmax and sums are in float32; a row's result depends neither on the batch around it nor
    on the number of threads. Slots that a row does not see are never part of its arithmetic.

    Args:
        query: [T, H, D] float32, bfloat16 or float16; D contiguous, a multiple of 16 up to 256.
        key_cache: [num_blocks, Hkv, block_size, D] as vLLM's CPU backend makes it,
            ``kv_cache.view(num_blocks, Hkv, 2 * block_size, D).chunk(2, dim=2)[0]``, of the
            query's dtype; what its blocks hold is described above. block_size % 16 == 0,
            H % Hkv == 0.
        value_cache: the other chunk.
        block_table: [R, max_blocks] int32 physical blocks; only those behind visible slots are
            looked at.
        cu_rows: [R + 1] int32 prefix sums of rows per request, from 0 to T.
        context_lens: [R] int32, slots that every row of the request attends to.
        mask: [T, W] int64; bit j % 64 of word j // 64 is bit j.
        scale: multiplies the scores.
        softcap: c > 0 turns a score s into c * tanh(s / c); 0 is off.
        out: [T, H, D] like query (D contiguous), overwritten; None allocates.
    """
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    kv = (key_cache, value_cache, block_table)
    arguments = (query, *kv, cu_rows, context_lens, mask, scale, softcap, out)
    try:
        torch.ops.vllm_echo.tree_attention(*arguments)
    except NotImplementedError as error:
        _refuse_device("tree_attention", arguments, error)
    return out


def commit_kv(
    kv_caches: list[torch.Tensor],
    block_table: torch.Tensor,
    root_slots: torch.Tensor,
    path_rows: torch.Tensor,
    path_lens: torch.Tensor,
) -> None:
    """Move the KV of accepted paths into the linear prefix, in every layer, in place.

    For request r and k = 1 .. path_lens[r], slot root_slots[r] + path_rows[r, k - 1] is copied
    bit by bit to slot root_slots[r] + k. Rows that are in place already cost nothing.

    Args:
        kv_caches: raw caches, one a layer, [num_blocks, Hkv, block_size, 2 * D] in the layout
            above; any dtype of 2 or 4 bytes; a block's interior contiguous.
        block_table: [R, max_blocks] int32 physical blocks.
        root_slots: [R] int32 slots of the roots.
        path_rows: [R, P] int32 local rows, strictly increasing, each >= its depth k (which makes
            the order of the copies safe); entries from path_lens[r] on are ignored.
        path_lens: [R] int32 in 0 .. P.

    Raises:
        ValueError: a path does not increase, or leads outside the cache (nothing is moved then).
    """
    arguments = (kv_caches, block_table, root_slots, path_rows, path_lens)
    try:
        torch.ops.vllm_echo.commit_kv(*arguments)
    except NotImplementedError as error:
        _refuse_device("commit_kv", arguments, error)


def accept_paths(
    target_tokens: torch.Tensor,
    cu_rows: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk each tree from its root along the target's own tokens.

    At a row, the child that carries target_tokens[row] is stepped into (the first one, should
    two carry it); without such a child the walk ends and target_tokens[row] is its last output.

    Args:
        target_tokens: [T] int64 or int32, the target's next token after each row.
        cu_rows: [R + 1] int32 prefix sums of rows per request, from 0 to T.
        tokens: [T] int32 tokens of the nodes; the root's entry is ignored, and a negative token
            (padding) never matches.
        parents: [T] int32 local row of the parent: -1 for the root, smaller than the own row for
            a node (-1 there detaches it: no walk reaches it). A request that breaks this accepts
            no node.

    Returns:
        out_tokens [R, L + 1] int32: the accepted tokens, then the target's last one, then -1.
        path_rows [R, L] int32: local rows of the accepted nodes, then -1.
        num_accepted [R] int32: nodes accepted.
        L is the largest number of nodes of a request. A request without rows gives only -1.
    """
    arguments = (target_tokens, cu_rows, tokens, parents)
    try:
        return torch.ops.vllm_echo.accept_paths(*arguments)
    except NotImplementedError as error:
        _refuse_device("accept_paths", arguments, error)


def pack_trees(
    tokens: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, num_nodes: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Flatten the trees of a step, request by request: the root, then the nodes in order.

    Args:
        tokens, parents, depths: [R, N] int32, the nodes of each request as ``DraftTrees`` has
            them; a parent is -1 (the root) or an earlier node. Entries at or beyond the
            request's ``num_nodes`` are not read.
        num_nodes: [R] int32, 0 to N.

    Returns:
        cu_rows [R + 1] int32, tokens, parents, depths [T] int32, ancestors [T, W] int64,
        is_chain [R] bool, as ``vllm_echo.tree.SuperTree`` has them; W words hold the largest tree.

    ValueError: a count out of range, or a parent that is not before its node.
    """
    arguments = (tokens, parents, depths, num_nodes)
    try:
        return torch.ops.vllm_echo.pack_trees(*arguments)
    except NotImplementedError as error:
        _refuse_device("pack_trees", arguments, error)


def build_info() -> dict[str, str]:
    """``simd``: what runs, portable, avx2 or avx512; ``torch``, ``compiler``: what built it."""
    return dict(item.split("=", 1) for item in torch.ops.vllm_echo.build_info().split(";"))


def set_simd_level(name: str) -> None:
    """Use the kernels of a lower instruction set; for tests and benchmarks.

    The process starts at the best level that the CPU offers. ValueError: not available here.
    """
    torch.ops.vllm_echo.set_simd_level(name)


def _refuse_device(op: str, arguments: tuple[object, ...], error: NotImplementedError) -> NoReturn:
    """The dispatcher found no kernel: say which tensor is to blame."""
    try:
        _require_cpu(op, arguments)
    except TypeError as refusal:
        raise refusal from error
    raise error


def _require_cpu(op: str, arguments: tuple[object, ...]) -> None:
    schema = getattr(torch.ops.vllm_echo, op).default._schema
    for argument, value in zip(schema.arguments, arguments, strict=True):
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, torch.Tensor) and not item.is_cpu:
                raise TypeError(f"{op}: {argument.name} must be on the CPU, got {item.device}")


# Fake kernels: shapes for torch.compile and opcheck. Fake tensors keep their device, the CPU, but
# a real meta tensor is refused: one among CPU tensors would make the call do nothing.


@torch.library.register_fake("vllm_echo::tree_attention")
def _(*arguments: object) -> None:
    _require_cpu("tree_attention", arguments)


@torch.library.register_fake("vllm_echo::commit_kv")
def _(*arguments: object) -> None:
    _require_cpu("commit_kv", arguments)


@torch.library.register_fake("vllm_echo::accept_paths")
def _(
    target_tokens: torch.Tensor, cu_rows: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _require_cpu("accept_paths", (target_tokens, cu_rows, tokens, parents))
    num_requests = cu_rows.shape[0] - 1
    num_nodes = torch.library.get_ctx().new_dynamic_size()  # the largest tree: known at run time
    return (
        tokens.new_empty(num_requests, num_nodes + 1),
        tokens.new_empty(num_requests, num_nodes),
        tokens.new_empty(num_requests),
    )


@torch.library.register_fake("vllm_echo::pack_trees")
def _(
    tokens: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, num_nodes: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    _require_cpu("pack_trees", (tokens, parents, depths, num_nodes))
    num_requests = tokens.shape[0]
    context = torch.library.get_ctx()
    num_rows, num_words = context.new_dynamic_size(), context.new_dynamic_size()
    return (
        tokens.new_empty(num_requests + 1),
        tokens.new_empty(num_rows),
        tokens.new_empty(num_rows),
        tokens.new_empty(num_rows),
        tokens.new_empty(num_rows, num_words, dtype=torch.int64),
        tokens.new_empty(num_requests, dtype=torch.bool),
    )
