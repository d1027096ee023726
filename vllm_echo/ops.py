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

Every operator checks its arguments before it writes anything: a wrong dtype, shape or value (a
block number outside the cache, say) raises ValueError, a wrong device TypeError; the message names
the tensor. Nothing is ever read or written out of bounds. The checks are in C++, where they cost
little even at one call a layer, and hold for direct calls of ``torch.ops.vllm_echo`` too.

``CUDA_OPERATORS`` run on a CUDA device, too, where the build has its kernels (``build_info``).
Nothing there waits for the device, so that all may be captured in a graph: sizes that depend on
values must be given (``max_rows``, ``max_nodes``), and values cannot be refused. A malformed one
leads to an empty acceptance, a detached node or a move that is left out, of that request alone.
"""

from typing import Any

import torch

from vllm_echo.ops_library import CUDA_OPERATORS as CUDA_OPERATORS
from vllm_echo.ops_library import require_devices


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
    _call("tree_attention", query, *kv, cu_rows, context_lens, mask, scale, softcap, out)
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
        kv_caches: one a layer. On a CPU raw caches, [num_blocks, Hkv, block_size, 2 * D] in the
            layout above; any dtype of 2 or 4 bytes; a block's interior contiguous. On a CUDA
            device [2, num_blocks, block_size, Hkv, D], keys and values, any dtype; all of one
            shape and with the same strides, D contiguous; 160 layers at most.
        block_table: [R, max_blocks] int32 physical blocks.
        root_slots: [R] int32 slots of the roots.
        path_rows: [R, P] int32 local rows, strictly increasing, each >= its depth k (which makes
            the order of the copies safe); entries from path_lens[r] on are ignored.
        path_lens: [R] int32 in 0 .. P.

    Raises:
        ValueError: a path does not increase, or leads outside the cache (nothing is moved then).
    """
    _call("commit_kv", kv_caches, block_table, root_slots, path_rows, path_lens)


def tree_part_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_rows: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of tree rows among themselves, to be merged with that over their context. On a
    CUDA device only: on a CPU ``tree_attention`` does both at once.

    A row attends to the rows of its request that its ancestor bits name. Softmax and sums are in
    float32. A row that sees none, or belongs to no request, gives zeros and -inf.

    Args:
        query: [T, H, D] float32, bfloat16 or float16, D contiguous: 64, 96, 128 or 256.
        key, value: [T, Hkv, D] of the query's dtype, the step's own; H % Hkv == 0.
        cu_rows: [R + 1] int32, as ``pack_trees`` makes it.
        ancestors: [T, W] int64, likewise; bits beyond the rows of a request are not looked at.
        scale: multiplies the scores.
        softcap: c > 0 turns a score s into c * tanh(s / c); 0 is off.

    Returns:
        out [T, H, D] like query; lse [H, T] float32, natural log of the sum of exp(score), as
        vLLM's merge_attn_states takes it.
    """
    return _call("tree_part_attention", query, key, value, cu_rows, ancestors, scale, softcap)


def accept_paths(
    target_tokens: torch.Tensor,
    cu_rows: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    max_nodes: int | None = None,
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
        max_nodes: L below; longer paths are cut, which loses nothing but their rest.

    Returns:
        out_tokens [R, L + 1] int32: the accepted tokens, then the target's last one, then -1.
        path_rows [R, L] int32: local rows of the accepted nodes, then -1.
        num_accepted [R] int32: nodes accepted.
        L is the largest number of nodes of a request, if not given. A request without rows gives
        only -1.
    """
    return _call("accept_paths", target_tokens, cu_rows, tokens, parents, max_nodes)


def accept_greedy(
    logits: torch.Tensor,
    cu_rows: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    max_nodes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``accept_paths`` with the most likely token of every row that a walk visits.

    Ties go to the lowest token, and a NaN counts as largest, as in ``torch.argmax``; a walk ends at
    a row that has one. Rows that no walk visits are not read.

    Args:
        logits: [T, V] float32, bfloat16 or float16, V at least 1; V contiguous.
        cu_rows, tokens, parents, max_nodes: as for ``accept_paths``, and so are the results.
    """
    return _call("accept_greedy", logits, cu_rows, tokens, parents, max_nodes)


def accept_sampled(
    logits: torch.Tensor,
    cu_rows: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    root_positions: torch.Tensor,
    max_nodes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``accept_paths`` with a token drawn at every row that a walk visits.

    The draw is Gumbel-max: the largest logit / temperature + noise, the noise a function of the
    request's seed, the row's position (its root's plus its depth) and the token alone, as vLLM's
    Model Runner V2 has it. So the tokens are those of plain decoding with the same seed. Ties and
    NaN as in ``accept_greedy``.

    Args:
        logits, cu_rows, tokens, parents, max_nodes: as for ``accept_greedy``.
        depths: [T] int32.
        temperatures: [R] float32; 0 is greedy.
        seeds: [R] int64.
        root_positions: [R] int64; the low 32 bits of a position count.
    """
    trees = (cu_rows, tokens, parents, depths)
    draws = (temperatures, seeds, root_positions)
    return _call("accept_sampled", logits, *trees, *draws, max_nodes)


def pack_trees(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    num_nodes: torch.Tensor,
    max_rows: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Flatten the trees of a step, request by request: the root, then the nodes in order.

    Args:
        tokens, parents, depths: [R, N] int32, the nodes of each request as ``DraftTrees`` has
            them; a parent is -1 (the root) or an earlier node. Entries at or beyond the
            request's ``num_nodes`` are not read.
        num_nodes: [R] int32, 0 to N.
        max_rows: T below; rows that are left are padding (-1, -1, 0 and no ancestor). A device
            needs it, as it does not wait for the counts.

    Returns:
        cu_rows [R + 1] int32, tokens, parents, depths [T] int32, ancestors [T, W] int64,
        as ``vllm_echo.tree.SuperTree`` has them; W words hold the largest tree, or, with
        ``max_rows``, a tree of N nodes.

    ValueError: a count out of range, or a parent that is not before its node.
    """
    return _call("pack_trees", tokens, parents, depths, num_nodes, max_rows)


def rank_trees(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    scores: torch.Tensor,
    max_nodes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best ``max_nodes`` candidates of each request, in descending score, ties by index.

    Args:
        tokens, parents, depths: [R, C] int32, as ``CandidateTrees`` has them; a parent is -1 (the
            root) or any candidate of its request. The last dimension is contiguous.
        scores: [R, C] float32; NaN counts as -inf.
        max_nodes: at least 0; may be more than there are candidates.

    Returns:
        tokens, parents, depths [R, W] int32, scores [R, W] float32, W = min(max_nodes, C); a
        parent is its place in this order, which is W or more when it is not among the kept.

    ValueError: a kept candidate whose parent is no candidate.
    """
    return _call("rank_trees", tokens, parents, depths, scores, max_nodes)


def best_paying(
    scores: torch.Tensor,
    caps: torch.Tensor,
    added_ms: torch.Tensor,
    num_requests: int,
    plain_ms: float,
) -> torch.Tensor:
    """How many nodes of each request make the step's output tokens come fastest.

    Of all nodes the n with the highest exp(score), in float32, ties by request and then by rank,
    take ``plain_ms + added_ms[n]`` for ``num_requests`` tokens and the sum of theirs. Of equally
    fast n the smallest is chosen. Nodes whose exp is 0 or NaN are never taken.

    Args:
        scores: [R, C] float32 log acceptance probabilities, descending within a request.
        caps: [R] int32, most nodes of each request; may be more than C.
        added_ms: [K + 1] float64, what 0 to K nodes add; K is the most that may be taken.
        num_requests: at least 0; tokens that come in any case.
        plain_ms: positive, unless K is 0.

    Returns:
        num_nodes [R] int32.
    """
    return _call("best_paying", scores, caps, added_ms, num_requests, plain_ms)


def score_children(
    log_probs: torch.Tensor,
    requests: torch.Tensor,
    sampled: torch.Tensor,
    curves: torch.Tensor,
) -> torch.Tensor:
    """Draft log-probabilities as log acceptance probabilities, each by its request's curve.

    log sigmoid(intercept + slope * logit(q)) of log q, in float32, within 1e-6 of the value in
    float64 as far as that is above -1, and within 1e-6 of its size below. q = 1 counts as
    exp(-1e-6); -inf (no child) and NaN stay what they are. A score depends on its own value and
    curve only, not on its place.

    Args:
        log_probs: [A, F, K] float32, contiguous.
        requests: [A] int64 rows of ``sampled``, ascending.
        sampled: [R] bool, which of the two curves a request has.
        curves: [2, 2] float32, (intercept, slope) where ``sampled`` is False, then where True.

    Returns:
        scores [A, F, K] float32.
    """
    return _call("score_children", log_probs, requests, sampled, curves)


def append_layer(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    scores: torch.Tensor,
    requests: torch.Tensor,
    child_tokens: torch.Tensor,
    child_scores: torch.Tensor,
    chain_only: torch.Tensor,
    parent_scores: torch.Tensor | None = None,
    parent_columns: torch.Tensor | None = None,
    first_parent_column: int = 0,
) -> torch.Tensor:
    """Write the drafted children of A requests into their rows of a layer of candidates.

    A path's score is its parent's plus the child's, in float32. Children that may not be drafted
    get -inf: where that sum is NaN, and all but the first of a parent where ``chain_only``.

    Args:
        tokens, parents: [R, M] int32, the layer's columns of the table, written to; M = F * K.
            The last dimension is contiguous.
        scores: [R, M] float32, likewise.
        requests: [A] int64, ascending: the rows that are written.
        child_tokens: [A, F, K] int32, K children of each of F parents, contiguous.
        child_scores: [A, F, K] float32, contiguous.
        chain_only: [R] bool.
        parent_scores: [A, F] float32. None: the root is the only parent, with score 0.
        parent_columns: [A, F] int64, places of the parents in the layer above.
        first_parent_column: column of the table where that layer begins.

    Returns:
        best [R] float32, the highest score of each request's layer; -inf where there is none.
    """
    children = (child_tokens, child_scores, chain_only)
    above = (parent_scores, parent_columns, first_parent_column)
    return _call("append_layer", tokens, parents, scores, requests, *children, *above)


def grant_layer(
    best: torch.Tensor,
    active: torch.Tensor,
    caps: torch.Tensor,
    deepest: torch.Tensor,
    num_layers: torch.Tensor,
    truncated: torch.Tensor,
    depth: int,
    threshold: float | None,
    budget: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer of phase 1: the gate, then a node for those that want a layer more.

    Requests that are active, and whose ``best`` is above -inf, come to the gate; it lets pass those
    with exp(best) > threshold, in float32, and truncates the others. Of those that passed and have
    fewer layers than their cap, ``budget`` are granted one: the highest exp(best) first, ties by
    request, so that every rank decides alike.

    Args:
        best: [R] float32, the best path score of the layer drafted from ``depth``.
        active: [R] bool.
        caps, deepest: [R] int32, most nodes and last layer of each request.
        num_layers: [R] int32, increased by one where granted.
        truncated: [R] bool, set where the gate cuts.
        threshold: None where there is no gate.
        budget: nodes left; less than 1 grants none.

    Returns:
        deeper [R] bool: granted, and depth + 1 is not its last layer.
        counts [3] int64: passed, cut, granted.
    """
    state = (best, active, caps, deepest, num_layers, truncated)
    return _call("grant_layer", *state, depth, threshold, budget)


def expect_gain(
    best: torch.Tensor,
    active: torch.Tensor,
    deepest: torch.Tensor,
    sampled: torch.Tensor,
    best_child: torch.Tensor,
    depth: int,
    price: float,
    ms_per_token: float,
    request_ms: float,
    layer_ms: float,
) -> torch.Tensor:
    """Who is worth a layer more, if together they are worth the forward that drafts it.

    A request's gain is (exp(best) * best_child - price) * ms_per_token - request_ms, in float64
    but for exp, and it is worth the layer if that is positive; nobody is if the sum of the positive
    gains is not above ``layer_ms``. Only active requests whose ``best`` is above -inf and whose
    last layer is below depth + 1 count.

    Args:
        best: [R] float32, log acceptance probability of the best path.
        active: [R] bool. deepest: [R] int32. sampled: [R] bool.
        best_child: [2] float64, acceptance probability of the likeliest child where ``sampled`` is
            False, then where True.

    Returns:
        deeper [R] bool.
    """
    state = (best, active, deepest, sampled, best_child)
    return _call("expect_gain", *state, depth, price, ms_per_token, request_ms, layer_ms)


def grant_width(
    scores: torch.Tensor,
    truncated: torch.Tensor,
    granted: torch.Tensor,
    caps: torch.Tensor,
    budget: int,
) -> torch.Tensor:
    """Phase 2: nodes per request once ``budget`` is spent on the best candidates left.

    Those of truncated requests come first, then all others; within a class by score, ties by
    request and then by rank.

    Args:
        scores: [R, C] float32, descending within a request. Candidates are those that are finite.
        truncated: [R] bool.
        granted: [R] int32, nodes that each request has already.
        caps: [R] int32, most nodes of each request; may be more than C.
        budget: nodes left; less than 1 adds none.

    Returns:
        counts [R] int32.
    """
    return _call("grant_width", scores, truncated, granted, caps, budget)


def schedule_budget(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    scores: torch.Tensor,
    caps: torch.Tensor,
    deepest: torch.Tensor,
    thresholds: torch.Tensor,
    budget: int,
    width: bool,
    max_nodes: int,
) -> tuple[torch.Tensor, ...]:
    """The elastic scheduler at once, over candidates of all layers: gates, depth, then width.

    The result is that of a draft loop which asks ``grant_layer`` after every layer and drafts no
    further for those that it stops, then ``rank_trees`` and ``grant_width``: candidates of layers
    that would not have been drafted do not count. For a device that drafts all layers before it
    decides.

    Args:
        tokens, parents, depths: [R, C] int32, as ``CandidateTrees`` has them, the last dimension
            contiguous.
        scores: [R, C] float32; NaN counts as -inf.
        caps, deepest: [R] int32, most nodes and last layer of each request.
        thresholds: [D] float32, the gate at depth 0 to D - 1; NaN is none. D layers are drafted.
        budget: nodes of all requests.
        width: False ends after phase 1.
        max_nodes: columns of the trees, no more than C are returned.

    Returns:
        tokens, parents, depths [R, W] int32, scores [R, W] float32, as from ``rank_trees``;
        num_nodes, num_layers [R] int32; truncated [R] bool; gate_counts [D, 3] int64: passed, cut,
        granted.
    """
    candidates = (tokens, parents, depths, scores)
    limits = (caps, deepest, thresholds, budget, width, max_nodes)
    return _call("schedule_budget", *candidates, *limits)


def next_frontier(
    tokens: torch.Tensor,
    scores: torch.Tensor,
    active: torch.Tensor,
    own_bits: torch.Tensor,
    top_k: int,
    previous_requests: torch.Tensor | None = None,
    ancestors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The best F candidates of a layer, for each of the A active requests: the nodes to expand.

    In descending score, ties by column; NaN counts as -inf, and -inf is expanded, too.

    Args:
        tokens: [R, M] int32, the layer's candidates, those of one parent side by side. The last
            dimension is contiguous.
        scores: [R, M] float32.
        active: [R] bool.
        own_bits: [F, W] int64, the ancestor bit of each node's own draft slot; F <= M.
        top_k: children of each parent, below the first layer.
        previous_requests: [P] int64 ascending, the requests of the previous frontier; all
            active ones are among them. None at the first layer, where the root is the parent.
        ancestors: [P, F', W] int64, the ancestor bits of the previous frontier's nodes; the layer
            has at most F' * top_k candidates.

    Returns:
        requests [A] int64, ascending; tokens [A, F] int32; parent_rows [A, F] int64: the request
        at the first layer, row p * F' + f of the previous frontier below; ancestors [A, F, W]
        int64: the parent's and the own bit; columns [A, F] int64: places in the layer; scores
        [A, F] float32.
    """
    previous = (previous_requests, ancestors)
    return _call("next_frontier", tokens, scores, active, own_bits, top_k, *previous)


def read_trees(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    num_nodes: torch.Tensor,
    slots: torch.Tensor,
    scheduled: torch.Tensor,
    num_scheduled: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Structure of the scheduled tokens: the stored tree's if they lead it, else a chain's.

    Args:
        tokens, parents, depths: [S, N] int32, as ``TreeTable`` has them.
        num_nodes: [S] int32, nodes stored.
        slots: [R] int64, rows of the table.
        scheduled: [R, K] int32 tokens, K <= N; those from ``num_scheduled`` on are not looked at.
        num_scheduled: [R] int32.

    Returns:
        parents, depths [R, K] int32.
    """
    table = (tokens, parents, depths, num_nodes)
    return _call("read_trees", *table, slots, scheduled, num_scheduled)


def build_info() -> dict[str, str]:
    """``simd``: what runs, portable, avx2 or avx512; ``torch``, ``compiler``: what built it;
    ``cuda``: architectures that there are kernels for, or "none"."""
    return dict(item.split("=", 1) for item in torch.ops.vllm_echo.build_info().split(";"))


def set_simd_level(name: str) -> None:
    """Use the kernels of a lower instruction set; for tests and benchmarks.

    The process starts at the best level that the CPU offers. ValueError: not available here.
    """
    torch.ops.vllm_echo.set_simd_level(name)


def _call(op: str, *arguments: object) -> Any:
    try:
        return getattr(torch.ops.vllm_echo, op)(*arguments)
    except NotImplementedError as error:  # the dispatcher found no kernel: name the tensor
        try:
            require_devices(op, arguments)
        except TypeError as refusal:
            raise refusal from error
        raise
