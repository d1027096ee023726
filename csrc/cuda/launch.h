// SPDX-License-Identifier: Apache-2.0
// The CUDA launchers: pointers, sizes and a stream, nothing of PyTorch. Each returns what the
// launch returned. Nothing is allocated, nothing waits: all may be captured in a graph.
//
// Values are on the device, so a kernel cannot refuse them: malformed ones lead to an empty
// acceptance of their request, never out of bounds.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace vllm_echo::cuda {

enum class Element : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// A table of int32 on the device; `stride` elements from row to row.
struct IntTable {
  const int32_t* data;
  int64_t stride;
};

struct PackTrees {
  IntTable tokens, parents, depths;  // [num_requests, width]
  const int32_t* num_nodes;          // [num_requests], taken as 0 .. width
  int64_t num_requests;
  int64_t width;
  int64_t max_rows;     // of the outputs; rows of no request are padding
  int64_t num_words;    // of an ancestor row: 1 + width bits fit
  int32_t* cu_rows;     // [num_requests + 1]
  int32_t* tokens_out;  // [max_rows], and so are the next two
  int32_t* parents_out;
  int32_t* depths_out;
  uint64_t* ancestors;  // [max_rows, num_words]
};
cudaError_t pack_trees(const PackTrees&, cudaStream_t);

// Trees of a super-tree, as pack_trees makes them.
struct Trees {
  const int32_t* cu_rows;  // [num_requests + 1]
  const int32_t* tokens;   // [num_rows]
  const int32_t* parents;  // [num_rows]
  int64_t num_requests;
  int64_t num_rows;
};

struct Paths {
  int64_t max_nodes;      // of a request; longer paths are cut
  int32_t* tokens;        // [num_requests, max_nodes + 1]
  int32_t* rows;          // [num_requests, max_nodes]
  int32_t* num_accepted;  // [num_requests]
};

// The target's token after each row: int64, or int32 where not `wide`.
struct Targets {
  const void* data;
  bool wide;
};
cudaError_t accept_paths(const Trees&, const Targets&, const Paths&, cudaStream_t);

struct Logits {
  const void* data;  // [num_rows, vocab]
  Element element;
  int64_t stride;
  int64_t vocab;
  // Null for greedy walks; otherwise of each request, and of each row its depth.
  const float* temperatures;  // 0: greedy
  const int64_t* seeds;
  const int64_t* root_positions;
  const int32_t* depths;
};
cudaError_t accept_logits(const Trees&, const Logits&, const Paths&, cudaStream_t);

constexpr int kMaxLayers = 160;

struct LayerPlanes {
  char* keys[kMaxLayers];
  char* values[kMaxLayers];
};

// All layers have one shape and one set of strides; strides in bytes.
struct CommitKv {
  int64_t num_layers;  // at most kMaxLayers
  int64_t num_blocks, block_size, num_kv_heads, head_bytes;
  int64_t block_stride, slot_stride, head_stride;
  const int32_t* block_table;  // [num_requests, table_width]
  int64_t table_stride, table_width;
  const int32_t* root_slots;  // [num_requests]
  IntTable path_rows;         // [num_requests, path_width]
  int64_t path_width;
  const int32_t* path_lens;  // [num_requests]
  int64_t num_requests;
};
cudaError_t commit_kv(const LayerPlanes&, const CommitKv&, cudaStream_t);

struct TreePart {
  const void *query, *key, *value;  // [num_rows, heads, head_dim], head_dim contiguous
  int64_t query_row, query_head, key_row, key_head, value_row, value_head;  // strides, elements
  Element element;
  const int32_t* cu_rows;     // [num_requests + 1]
  const uint64_t* ancestors;  // [num_rows, num_words]
  int64_t ancestor_stride, num_words;
  int64_t num_requests, num_rows, num_heads, num_kv_heads;
  int head_dim;
  float scale, softcap;
  void* out;   // [num_rows, num_heads, head_dim], contiguous
  float* lse;  // [num_heads, num_rows]
};
cudaError_t tree_part_attention(const TreePart&, cudaStream_t);

// Candidates of all layers, and what the elastic scheduler makes of them.
struct ScheduleBudget {
  IntTable tokens, parents, depths;  // [num_requests, num_candidates]
  const float* scores;
  int64_t score_stride;
  int64_t num_requests, num_candidates;
  const int32_t* caps;      // [num_requests] most nodes
  const int32_t* deepest;   // [num_requests] last layer
  const float* thresholds;  // [num_depths]; NaN: no gate
  int64_t num_depths;
  int64_t budget;
  bool width;
  int64_t max_nodes;    // columns of the ranked outputs; at most num_candidates
  int32_t* tokens_out;  // [num_requests, max_nodes], and so are the next three
  int32_t* parents_out;
  int32_t* depths_out;
  float* scores_out;
  int32_t* num_nodes;  // [num_requests], and so are the next two
  int32_t* num_layers;
  bool* truncated;
  int64_t* gate_counts;  // [num_depths, 3] passed, cut, granted
  // Scratch.
  float* best;           // [num_requests, num_depths]
  uint64_t* keys;        // [num_requests, max(max_nodes, 1)]
  int64_t* budget_left;  // [1]
};
constexpr int64_t kMaxCandidates = 4000;  // of a request: they are ranked in shared memory
cudaError_t schedule_budget(const ScheduleBudget&, cudaStream_t);

}  // namespace vllm_echo::cuda
