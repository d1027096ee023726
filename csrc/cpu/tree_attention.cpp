// SPDX-License-Identifier: Apache-2.0
// Checks tree attention's inputs, cuts the work into tiles and runs them on PyTorch's threads.
#include "../include/tree_attention.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "../common/checks.h"
#include "../include/tree_mask.h"
#include "floats.h"
#include "ops.h"
#include "simd.h"

namespace vllm_echo::cpu {
namespace {

// Query vectors that share a pass over the context. With more, scores would leave the L1 cache.
constexpr int64_t kQueriesPerTile = 48;
// Below this many multiply-adds a thread would cost more than it saves.
constexpr int64_t kWorkPerThread = 1 << 17;
constexpr int64_t kCacheLine = 64;

void require_same_shape(const Tensor& tensor, const char* what, const Tensor& like) {
  for (int64_t dim = 0; dim < like.dim(); ++dim) require_size(tensor, what, dim, like.size(dim));
}

// Shapes and dtypes; after this the sizes of all tensors agree.
void require_inputs(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                    const Tensor& block_table, const Tensor& cu_rows, const Tensor& context_lens,
                    const Tensor& mask, const Tensor& out) {
  const FloatName dtype = float_of(query, "tree_attention: query");
  require_tensor(query, "tree_attention: query", dtype.dtype, dtype.name, 3);
  require_tensor(out, "tree_attention: out", dtype.dtype, dtype.name, 3);
  require_tensor(key_cache, "tree_attention: key_cache", dtype.dtype, dtype.name, 4);
  require_tensor(value_cache, "tree_attention: value_cache", dtype.dtype, dtype.name, 4);
  require_int32(block_table, "tree_attention: block_table", 2);
  require_int32(cu_rows, "tree_attention: cu_rows", 1);
  require_int32(context_lens, "tree_attention: context_lens", 1);
  require_tensor(mask, "tree_attention: mask", ScalarType::Long, "int64", 2);
  require_same_shape(out, "tree_attention: out", query);
  require_same_shape(value_cache, "tree_attention: value_cache", key_cache);
  require_size(mask, "tree_attention: mask", 0, query.size(0));
  require_size(block_table, "tree_attention: block_table", 0, context_lens.size(0));
  require_size(cu_rows, "tree_attention: cu_rows", 0, context_lens.size(0) + 1);
  require_prefix_sums(cu_rows, "tree_attention: cu_rows", query.size(0));

  const int64_t head_dim = query.size(2);
  require(head_dim > 0 && head_dim % 16 == 0 && head_dim <= 256,
          "tree_attention: query must have a head size that is a multiple of 16 up to 256, got ",
          head_dim);
  require_size(key_cache, "tree_attention: key_cache", 3, head_dim);
  const int64_t num_kv_heads = key_cache.size(1);
  require(num_kv_heads > 0 && query.size(1) % num_kv_heads == 0, "tree_attention: query has ",
          query.size(1), " heads, not a multiple of key_cache's ", num_kv_heads);
  require(key_cache.size(2) > 0 && key_cache.size(2) % 16 == 0,
          "tree_attention: key_cache must have a block size that is a multiple of 16, got ",
          key_cache.size(2));
  require(key_cache.stride(2) == head_dim && value_cache.stride(2) == head_dim,
          "tree_attention: key_cache and value_cache must be contiguous inside a block");
}

TreeAttentionParams make_params(const Tensor& query, const Tensor& key_cache,
                                const Tensor& value_cache, const Tensor& block_table,
                                const Tensor& cu_rows, const Tensor& context_lens,
                                const Tensor& mask, double scale, double softcap,
                                const Tensor& out) {
  TreeAttentionParams p{};
  p.query = query.data_ptr();
  p.query_row_stride = query.stride(0);
  p.query_head_stride = query.stride(1);
  p.out = out.data_ptr();
  p.out_row_stride = out.stride(0);
  p.out_head_stride = out.stride(1);
  p.num_requests = context_lens.size(0);
  p.num_heads = query.size(1);
  p.num_kv_heads = key_cache.size(1);
  p.heads_per_kv = p.num_heads / p.num_kv_heads;
  p.head_dim = query.size(2);
  p.block_size = key_cache.size(2);
  p.keys = {static_cast<char*>(key_cache.data_ptr()), key_cache.stride(0), key_cache.stride(1), 1,
            p.block_size};
  p.values = {static_cast<char*>(value_cache.data_ptr()), value_cache.stride(0),
              value_cache.stride(1), p.head_dim, 1};
  p.block_table = const_data<int32_t>(block_table);
  p.block_table_stride = block_table.stride(0);
  p.cu_rows = const_data<int32_t>(cu_rows);
  p.context_lens = const_data<int32_t>(context_lens);
  p.mask = const_data<uint64_t>(mask);
  p.mask_stride = mask.stride(0);
  p.mask_words = mask.size(1);
  p.scale = static_cast<float>(scale);
  p.softcap = static_cast<float>(softcap);
  return p;
}

// One past the highest slot any row of the request attends to.
int64_t slots_used(const TreeAttentionParams& p, int64_t request) {
  int64_t bits = 0;
  for (int64_t row = p.cu_rows[request]; row < p.cu_rows[request + 1]; ++row) {
    const uint64_t* words = p.mask + row * p.mask_stride;
    for (int64_t word = p.mask_words - 1; word * kMaskWordBits >= bits && word >= 0; --word) {
      if (words[word] == 0) continue;
      bits = std::max<int64_t>(bits, (word + 1) * kMaskWordBits - __builtin_clzll(words[word]));
      break;
    }
  }
  return p.context_lens[request] + bits;
}

// Block numbers come from another component; a wrong one must not become a read outside the cache.
// Returns the work.
int64_t require_readable(const TreeAttentionParams& p, int64_t max_blocks, int64_t num_blocks) {
  int64_t work = 0;
  for (int64_t r = 0; r < p.num_requests; ++r) {
    require(p.context_lens[r] >= 0, "tree_attention: context_lens must not be negative, got ",
            p.context_lens[r], " for request ", r);
    const int64_t rows = p.cu_rows[r + 1] - p.cu_rows[r];
    if (rows == 0) continue;
    const int64_t slots = slots_used(p, r);
    require_blocks(block_row(p, r).blocks, max_blocks, num_blocks, p.block_size, 0, slots,
                   "tree_attention: block_table", r);
    work += rows * slots * p.num_heads * p.head_dim;
  }
  return work;
}

int64_t count_tiles(const TreeAttentionParams& p, int64_t rows_per_tile) {
  int64_t tiles = 0;
  for (int64_t r = 0; r < p.num_requests; ++r) {
    tiles += (p.cu_rows[r + 1] - p.cu_rows[r] + rows_per_tile - 1) / rows_per_tile * p.num_kv_heads;
  }
  return tiles;
}

// Full tiles read the context least often; smaller ones only when threads would stand idle.
std::vector<AttentionTile> make_tiles(const TreeAttentionParams& p, int64_t num_threads) {
  int64_t rows_per_tile = std::max<int64_t>(1, kQueriesPerTile / p.heads_per_kv);
  while (rows_per_tile > 1 && count_tiles(p, rows_per_tile) < num_threads)
    rows_per_tile = (rows_per_tile + 1) / 2;
  std::vector<AttentionTile> tiles;
  tiles.reserve(count_tiles(p, rows_per_tile));
  for (int32_t r = 0; r < p.num_requests; ++r) {
    for (int32_t kv_head = 0; kv_head < p.num_kv_heads; ++kv_head) {
      for (int64_t row = p.cu_rows[r]; row < p.cu_rows[r + 1]; row += rows_per_tile) {
        tiles.push_back(
            {r, kv_head, row, std::min<int64_t>(rows_per_tile, p.cu_rows[r + 1] - row)});
      }
    }
  }
  return tiles;
}

// Threads take the next tile when they are free: requests differ in length, so an even split would
// leave some idle.
void run_tiles(const TreeAttentionParams& p, const std::vector<AttentionTile>& tiles,
               FloatType type, int64_t num_threads) {
  int64_t max_rows = 0;
  for (const AttentionTile& tile : tiles) max_rows = std::max(max_rows, tile.num_rows);
  const int64_t floats =
      (tile_scratch_floats(max_rows * p.heads_per_kv, p.head_dim) + 15) / 16 * 16;
  const std::unique_ptr<float[]> memory(
      new float[floats * num_threads + kCacheLine / sizeof(float)]);
  float* scratch = memory.get();
  scratch +=
      (kCacheLine - reinterpret_cast<uintptr_t>(scratch) % kCacheLine) % kCacheLine / sizeof(float);

  const TileKernel kernel = kernels().attention_tile;
  std::atomic<size_t> next{0};
  torch::stable::parallel_for(0, num_threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tiles.size();) {
        kernel(p, tiles[i], type, scratch + worker * floats);
      }
    }
  });
}

}  // namespace

void tree_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                    const Tensor& block_table, const Tensor& cu_rows, const Tensor& context_lens,
                    const Tensor& mask, double scale, double softcap, Tensor out) {
  require_inputs(query, key_cache, value_cache, block_table, cu_rows, context_lens, mask, out);
  require(softcap >= 0.0, "tree_attention: softcap must be 0 (off) or positive, got ", softcap);
  if (query.size(0) == 0 || query.size(1) == 0) return;
  const TreeAttentionParams p = make_params(query, key_cache, value_cache, block_table, cu_rows,
                                            context_lens, mask, scale, softcap, out);
  const int64_t work = require_readable(p, block_table.size(1), key_cache.size(0));
  const int64_t useful_threads = work / kWorkPerThread + 1;
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), useful_threads);
  const std::vector<AttentionTile> tiles = make_tiles(p, threads);
  run_tiles(p, tiles, float_of(query, "tree_attention: query").type,
            std::min<int64_t>(threads, tiles.size()));
}

}  // namespace vllm_echo::cpu
