# SPDX-License-Identifier: Apache-2.0
"""Tree attention against vLLM's own causal kernel on the same rows.

    OMP_NUM_THREADS=1 python benchmarks/ops/bench_tree_attention.py

Both kernels run on one cache, with a causal mask (a chain), so that they do the same work; the
tree column has a bushy tree's mask instead, which only our kernel can apply. Times are medians
of interleaved repetitions after a warm-up, in microseconds a layer.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm import _custom_ops as vllm_ops

from vllm_echo import ops

BLOCK_SIZE = 128


@dataclass
class Case:
    """Inputs of one measurement; every request has the same context and number of rows."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    cu_rows: torch.Tensor
    context_lens: torch.Tensor
    seq_lens: torch.Tensor
    scale: float


def make_case(
    batch: int,
    context: int,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> Case:
    blocks_each = -(-(context + rows) // BLOCK_SIZE)
    raw = torch.randn(batch * blocks_each, kv_heads, BLOCK_SIZE, 2 * head_dim).to(dtype)
    view = raw.view(batch * blocks_each, kv_heads, 2 * BLOCK_SIZE, head_dim)
    key_cache, value_cache = view.chunk(2, dim=2)
    order = torch.randperm(batch * blocks_each, dtype=torch.int32)
    return Case(
        query=torch.randn(batch * rows, heads, head_dim).to(dtype),
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=order.view(batch, blocks_each),
        cu_rows=torch.arange(0, batch * rows + 1, rows, dtype=torch.int32),
        context_lens=torch.full((batch,), context, dtype=torch.int32),
        seq_lens=torch.full((batch,), context + rows, dtype=torch.int32),
        scale=head_dim**-0.5,
    )


def chain_mask(batch: int, rows: int) -> torch.Tensor:
    return pack_mask(torch.ones(rows, rows, dtype=torch.bool).tril()).repeat(batch, 1)


def tree_mask(batch: int, rows: int, branching: int = 3) -> torch.Tensor:
    """A complete tree in breadth-first order."""
    visible = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        visible[row] |= visible[(row - 1) // branching]
    return pack_mask(visible).repeat(batch, 1)


def pack_mask(visible: torch.Tensor) -> torch.Tensor:
    rows, bits = visible.shape
    padded = torch.zeros(rows, -(-bits // 64) * 64, dtype=torch.bool)
    padded[:, :bits] = visible
    weights = torch.ones(64, dtype=torch.int64) << torch.arange(64)
    return (padded.view(rows, -1, 64) * weights).sum(dim=-1)


def ours(case: Case, mask: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        ops.tree_attention(
            case.query,
            case.key_cache,
            case.value_cache,
            case.block_table,
            case.cu_rows,
            case.context_lens,
            mask,
            case.scale,
            0.0,
            out,
        )

    return run


def stock(case: Case, out: torch.Tensor) -> Callable[[], None]:
    """vLLM's kernel; its schedule is made once a step, not once a layer, so it is left out."""
    num_heads, head_dim = case.query.shape[1:]
    schedule = vllm_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=case.seq_lens.shape[0],
        num_heads=num_heads,
        num_kv_heads=case.key_cache.shape[1],
        head_dim=head_dim,
        seq_lens=case.seq_lens,
        dtype=case.query.dtype,
        query_start_loc=case.cu_rows,
        causal=True,
        sliding_window_size=-1,
        isa="vec",
        enable_kv_split=True,
    )

    def run() -> None:
        vllm_ops.cpu_attention_with_kv_cache(
            query=case.query,
            key_cache=case.key_cache,
            value_cache=case.value_cache,
            output=out,
            query_start_loc=case.cu_rows,
            seq_lens=case.seq_lens,
            scale=case.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=case.block_table,
            softcap=0.0,
            scheduler_metadata=schedule,
            s_aux=None,
        )

    return run


def medians_us(
    runs: list[Callable[[], None]], seconds: float, clock: Callable[[], float]
) -> list[float]:
    """Median of each; the runs take turns, so that a disturbance meets all of them."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times[0]) < 3:
        for run, list_of_times in zip(runs, times, strict=True):
            start = clock()
            run()
            list_of_times.append(clock() - start)
    return [statistics.median(list_of_times) * 1e6 for list_of_times in times]


def measure(
    case: Case, rows: int, seconds: float, clock: Callable[[], float]
) -> tuple[float, float, float]:
    batch = case.context_lens.shape[0]
    outs = [torch.full_like(case.query, float("nan")) for _ in range(3)]
    runs = [
        stock(case, outs[0]),
        ours(case, chain_mask(batch, rows), outs[1]),
        ours(case, tree_mask(batch, rows), outs[2]),
    ]
    stock_us, chain_us, tree_us = medians_us(runs, seconds, clock)
    torch.testing.assert_close(outs[1], outs[0], rtol=2e-2, atol=2e-2)  # bf16 rounding
    return stock_us, chain_us, tree_us


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--heads", type=int, nargs=2, default=[9, 3], metavar=("H", "HKV"))
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 1024, 4096])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 7, 16, 31])
    parser.add_argument("--simd", default=None, help="an instruction set (default: the best)")
    parser.add_argument("--seconds", type=float, default=0.25, help="time for one line")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count CPU time, for a machine that others use too (one thread only)",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.simd:
        ops.set_simd_level(args.simd)
    torch.manual_seed(0)
    clock = time.process_time if args.cpu_time else time.perf_counter
    print(f"# {ops.build_info()}  threads={torch.get_num_threads()}  dtype={args.dtype}")
    print(f"# heads={args.heads[0]}/{args.heads[1]}  head_dim={args.head_dim}  block={BLOCK_SIZE}")
    print("batch context rows | stock us  chain us   tree us | chain/stock tree/stock")
    for batch in args.batches:
        for context in args.contexts:
            for rows in args.rows:
                heads, kv_heads = args.heads
                dtype = getattr(torch, args.dtype)
                case = make_case(batch, context, rows, heads, kv_heads, args.head_dim, dtype)
                stock_us, chain_us, tree_us = measure(case, rows, args.seconds, clock)
                print(
                    f"{batch:5d} {context:7d} {rows:4d} | {stock_us:8.1f} {chain_us:9.1f} "
                    f"{tree_us:9.1f} | {chain_us / stock_us:11.2f} {tree_us / stock_us:10.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
