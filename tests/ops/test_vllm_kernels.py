# SPDX-License-Identifier: Apache-2.0
"""Our view of vLLM's CPU cache, and our numbers, against vLLM's own kernels."""

import pytest
import torch

from tests.ops.kit import (
    NAN,
    TOLERANCE,
    Batch,
    cache_views,
    chain_parents,
    make_batch,
)
from vllm_echo import ops
from vllm_echo.reference.commit import slot_kv

vllm_ops = pytest.importorskip("vllm._custom_ops")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = [("vec", 32), ("vec", 64), ("vec", 128), ("vec16", 16), ("vec16", 48)]


def isa_of(block_size: int, head_dim: int) -> str:
    """What vLLM chooses on x86 without AMX."""
    return "vec" if block_size % 32 == 0 and head_dim % 32 == 0 else "vec16"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize(("isa", "block_size"), LAYOUTS)
def test_vllm_writes_the_layout_that_we_read(
    isa: str, block_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Keys dim-major, values slot-major, in every dtype: no packing in pairs for 16 bits."""
    if isa == "vec" and head_dim % 32:
        pytest.skip("vLLM uses vec16 for this head size")
    kv_cache = torch.full((4, 3, block_size, 2 * head_dim), NAN, dtype=dtype)
    slots = torch.randperm(4 * block_size)[: 2 * block_size + 5]
    key, value = torch.randn(2, len(slots), 3, head_dim).to(dtype)
    vllm_ops.cpu_attn_reshape_and_cache(key, value, *cache_views(kv_cache), slots, isa)
    identity = torch.arange(4, dtype=torch.int32)
    for i, slot in enumerate(slots.tolist()):
        found_key, found_value = slot_kv(kv_cache, identity, slot)
        assert torch.equal(found_key, key[i])
        assert torch.equal(found_value, value[i])
    assert kv_cache.isnan().sum() == (4 * block_size - len(slots)) * 3 * 2 * head_dim


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's 8-bit cache needs AVX-512")
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_an_8_bit_cache_is_moved_as_vllm_would_have_written_it(kind: str) -> None:
    """A path at rows 2, 3, 40 of a tree, moved, equals the same rows written in line."""
    key, value = torch.randn(2, 3, 3, 64).bfloat16()
    caches = []
    for slots in ([72, 73, 110], [71, 72, 73]):
        kv_cache = torch.zeros(4, 3, 64, 128, dtype=torch.uint8)
        vllm_ops.cpu_attn_reshape_and_cache(
            key, value, *cache_views(kv_cache), torch.tensor(slots), "vec", kv_cache_dtype=kind
        )
        caches.append(kv_cache)
    moved, wanted = caches
    assert not torch.equal(moved, wanted)
    table = torch.arange(4, dtype=torch.int32)[None]
    path = torch.tensor([[2, 3, 40]], dtype=torch.int32)
    root, length = torch.tensor([70], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    ops.commit_kv([moved], table, root, path, length)
    blocks = torch.arange(4, dtype=torch.int32)
    for slot in (71, 72, 73):
        for ours, theirs in zip(
            slot_kv(moved, blocks, slot), slot_kv(wanted, blocks, slot), strict=True
        ):
            assert torch.equal(ours, theirs)
            assert theirs.any()


def causal_attention_of_vllm(batch: Batch, softcap: float) -> torch.Tensor:
    rows = batch.cu_rows.diff()
    seq_lens = batch.context_lens + rows
    num_heads, head_dim = batch.query.shape[1:]
    key_cache, value_cache = batch.caches
    block_size = key_cache.shape[2]
    schedule = vllm_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(rows),
        num_heads=num_heads,
        num_kv_heads=key_cache.shape[1],
        head_dim=head_dim,
        seq_lens=seq_lens,
        dtype=batch.query.dtype,
        query_start_loc=batch.cu_rows,
        causal=True,
        sliding_window_size=-1,
        isa=isa_of(block_size, head_dim),
        enable_kv_split=True,
    )
    out = torch.full_like(batch.query, NAN)
    vllm_ops.cpu_attention_with_kv_cache(
        query=batch.query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=out,
        query_start_loc=batch.cu_rows,
        seq_lens=seq_lens,
        scale=batch.scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=batch.block_table.clamp(min=0),
        softcap=softcap,
        scheduler_metadata=schedule,
        s_aux=None,
    )
    return out


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block_size", "head_dim"), [(32, 64), (128, 64), (64, 128), (32, 80)])
@pytest.mark.parametrize("heads", [(9, 3), (8, 1)], ids=["9/3", "8/1"])
def test_a_chain_equals_vllms_causal_attention(
    heads: tuple[int, int], block_size: int, head_dim: int, dtype: torch.dtype, softcap: float
) -> None:
    batch = make_batch(
        [chain_parents(n) for n in (1, 7, 40)],
        [300, 33, 0],
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    # vLLM's kernel multiplies unused slots of a block by probability 0: no NaN there.
    batch.kv_cache.nan_to_num_(0.0)
    out = torch.full_like(batch.query, NAN)
    ops.tree_attention(*batch.attention_args, softcap, out)
    wanted = causal_attention_of_vllm(batch, softcap)
    torch.testing.assert_close(out, wanted, **TOLERANCE[dtype])
