// SPDX-License-Identifier: Apache-2.0
// Attention of tree rows over a paged KV cache: parameters and work items.
//
// A tree request has `rows` query rows (its root and nodes). Every row attends to the request's
// first `context_len` slots, and to those of the following slots that its mask names (its ancestors
// and itself).
#pragma once

#include <cstdint>

#include "paged_kv.h"

namespace vllm_echo {

struct TreeAttentionParams {
  const void* query;            // [rows of all requests, num_heads, head_dim], head_dim contiguous
  int64_t query_row_stride;     // elements
  int64_t query_head_stride;    // elements
  void* out;                    // as query
  int64_t out_row_stride;       // elements
  int64_t out_head_stride;      // elements
  KvPlane keys;                 // the layer's keys
  KvPlane values;               // the layer's values
  const int32_t* block_table;   // [num_requests, block_table_stride] physical blocks
  int64_t block_table_stride;   // elements between two requests
  const int32_t* cu_rows;       // [num_requests + 1] prefix sums of rows per request
  const int32_t* context_lens;  // [num_requests] slots that all rows of the request attend to
  const uint64_t* mask;         // [rows, mask_words], see tree_mask.h
  int64_t mask_stride;          // words between two rows
  int64_t mask_words;           // words in a row
  int64_t num_requests;
  int64_t num_heads;     // query heads
  int64_t num_kv_heads;  // key/value heads
  int64_t heads_per_kv;  // query heads that share a KV head
  int64_t head_dim;      // multiple of 16, at most 256
  int64_t block_size;    // slots in a block, multiple of 16
  float scale;           // multiplies q.k
  float softcap;         // c > 0: scores become c * tanh(score / c); 0: off
};

// A unit of work: some rows of one request for one KV head. Its query vectors (num_rows *
// heads_per_kv) share one pass over the context. The result of a row does not depend on the tile it
// falls into.
struct AttentionTile {
  int32_t request;
  int32_t kv_head;
  int64_t first_row;  // global row
  int64_t num_rows;
};

ECHO_HD BlockRow block_row(const TreeAttentionParams& p, int64_t request) {
  return {p.block_table + request * p.block_table_stride, p.block_size};
}

}  // namespace vllm_echo
