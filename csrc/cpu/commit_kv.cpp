// SPDX-License-Identifier: Apache-2.0
// Commits accepted paths on the CPU: checks everything, then shares the work among threads.
#include "../include/commit_kv.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>

#include "../common/checks.h"
#include "ops.h"

namespace vllm_echo::cpu {
namespace {

// Below this many moved elements the threads would cost more than they save.
constexpr int64_t kElementsPerThread = 1 << 14;

// One layer's cache, [num_blocks, num_kv_heads, block_size, 2 * head_dim], seen as keys and values.
struct LayerCache {
  KvPlane keys;
  KvPlane values;
  int64_t num_blocks;
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t head_dim;
};

LayerCache layer_cache(const Tensor& cache, const char* what) {
  require(cache.is_cpu(), what, " must be on the CPU");
  require(cache.dim() == 4, what, " must have 4 dimensions, got ", cache.dim());
  require(cache.element_size() == 1 || cache.element_size() == 2 || cache.element_size() == 4, what,
          " must have elements of 1, 2 or 4 bytes, got ", cache.element_size());
  const int64_t block_size = cache.size(2);
  const int64_t width = cache.size(3);
  require(block_size > 0 && width > 0 && width % 2 == 0, what,
          " must have a positive block size and an even last ", "dimension (2 * head_dim), got ",
          block_size, " and ", width);
  require(cache.stride(2) == width && cache.stride(3) == 1, what,
          " must be contiguous inside a block");
  const int64_t head_dim = width / 2;
  char* keys = static_cast<char*>(cache.data_ptr());
  char* values = keys + block_size * head_dim * static_cast<int64_t>(cache.element_size());
  return {{keys, cache.stride(0), cache.stride(1), 1, block_size},
          {values, cache.stride(0), cache.stride(1), head_dim, 1},
          cache.size(0),
          cache.size(1),
          block_size,
          head_dim};
}

template <typename Element>
void commit_head(const LayerCache& layer, const CommitPath& path, int64_t kv_head) {
  commit_dims<Element>(layer.keys, path, kv_head, layer.head_dim, 0, 1);
  commit_dims<Element>(layer.values, path, kv_head, layer.head_dim, 0, 1);
}

// Rows must increase and never lie before their place: then ascending moves are safe. Checked
// before anything moves.
void require_path(const CommitPath& path, int64_t request) {
  require(path.root_slot >= 0, "commit_kv: root_slots must not be negative, got ", path.root_slot,
          " for request ", request);
  for (int64_t k = 0; k < path.length; ++k) {
    const int64_t least = k == 0 ? 1 : path.rows[k - 1] + 1;
    require(path.rows[k] >= least,
            "commit_kv: path_rows must increase strictly from at least 1, got ", path.rows[k],
            " at depth ", k + 1, " of request ", request);
  }
}

struct CommitBatch {
  std::vector<LayerCache> layers;
  std::vector<CommitPath> paths;  // only those with something to move
  int64_t max_kv_heads = 0;
  int64_t num_moves = 0;  // over all paths, for one layer and head
};

void add_paths(CommitBatch& batch, const Tensor& block_table, const Tensor& root_slots,
               const Tensor& path_rows, const Tensor& path_lens) {
  const int64_t max_blocks = block_table.size(1);
  for (int64_t r = 0; r < path_lens.size(0); ++r) {
    const int64_t length = const_data<int32_t>(path_lens)[r];
    require(length >= 0 && length <= path_rows.size(1), "commit_kv: path_lens must lie in 0..",
            path_rows.size(1), ", got ", length, " for request ", r);
    const int32_t* blocks = const_data<int32_t>(block_table) + r * block_table.stride(0);
    CommitPath path{{blocks, 0},
                    const_data<int32_t>(root_slots)[r],
                    const_data<int32_t>(path_rows) + r * path_rows.stride(0),
                    length};
    require_path(path, r);
    if (num_rows_in_place(path) == length) continue;
    for (const LayerCache& layer : batch.layers) {
      const int64_t end = path.root_slot + path.rows[length - 1] + 1;
      require_blocks(blocks, max_blocks, layer.num_blocks, layer.block_size, path.root_slot + 1,
                     end, "commit_kv: block_table", r);
    }
    batch.num_moves += length - num_rows_in_place(path);
    batch.paths.push_back(path);
  }
}

void run_job(const CommitBatch& batch, int64_t job, size_t element_size) {
  const int64_t kv_head = job % batch.max_kv_heads;
  const int64_t path_index = job / batch.max_kv_heads % static_cast<int64_t>(batch.paths.size());
  const LayerCache& layer =
      batch.layers[job / batch.max_kv_heads / static_cast<int64_t>(batch.paths.size())];
  if (kv_head >= layer.num_kv_heads) return;
  CommitPath path = batch.paths[path_index];
  path.blocks.block_size = layer.block_size;
  if (element_size == 1) {
    commit_head<uint8_t>(layer, path, kv_head);
  } else if (element_size == 2) {
    commit_head<uint16_t>(layer, path, kv_head);
  } else {
    commit_head<uint32_t>(layer, path, kv_head);
  }
}

}  // namespace

void commit_kv(std::vector<Tensor> kv_caches, const Tensor& block_table, const Tensor& root_slots,
               const Tensor& path_rows, const Tensor& path_lens) {
  require_int32(block_table, "commit_kv: block_table", 2);
  require_int32(root_slots, "commit_kv: root_slots", 1);
  require_int32(path_rows, "commit_kv: path_rows", 2);
  require_int32(path_lens, "commit_kv: path_lens", 1);
  const int64_t num_requests = path_lens.size(0);
  require_size(block_table, "commit_kv: block_table", 0, num_requests);
  require_size(root_slots, "commit_kv: root_slots", 0, num_requests);
  require_size(path_rows, "commit_kv: path_rows", 0, num_requests);
  if (kv_caches.empty()) return;

  CommitBatch batch;
  const size_t element_size = kv_caches[0].element_size();
  for (size_t i = 0; i < kv_caches.size(); ++i) {
    const std::string what = "commit_kv: kv_caches[" + std::to_string(i) + "]";
    batch.layers.push_back(layer_cache(kv_caches[i], what.c_str()));
    require(kv_caches[i].element_size() == element_size, what,
            " must have the element size of kv_caches[0]");
    batch.max_kv_heads = std::max(batch.max_kv_heads, batch.layers.back().num_kv_heads);
  }
  add_paths(batch, block_table, root_slots, path_rows, path_lens);
  if (batch.paths.empty()) return;

  const int64_t paths = static_cast<int64_t>(batch.paths.size());
  const int64_t jobs = static_cast<int64_t>(batch.layers.size()) * paths * batch.max_kv_heads;
  const int64_t elements_per_job =
      std::max<int64_t>(1, 2 * batch.layers[0].head_dim * batch.num_moves / paths);
  torch::stable::parallel_for(0, jobs, kElementsPerThread / elements_per_job + 1,
                              [&](int64_t begin, int64_t end) {
                                for (int64_t job = begin; job < end; ++job)
                                  run_job(batch, job, element_size);
                              });
}

}  // namespace vllm_echo::cpu
