// SPDX-License-Identifier: Apache-2.0
// Where the key or value of one token lives in a paged KV cache.
//
// A request sees its cache as logical slots 0, 1, 2, ... (positions). A row of the block table maps
// logical block `slot / block_size` to a physical block; inside the block the layout is described
// by strides alone, so the same code serves vLLM's CPU cache (keys dim-major, values slot-major)
// and a CUDA cache (both slot-major).
#pragma once

#include <cstdint>

#include "host_device.h"

namespace vllm_echo {

// The keys, or the values, of one layer. Strides count elements.
struct KvPlane {
  char* data;            // element (block 0, head 0, slot 0, dim 0)
  int64_t block_stride;  // from one physical block to the next
  int64_t head_stride;   // from one KV head to the next inside a block
  int64_t slot_stride;   // from one slot to the next: 1 for CPU keys, head_dim for CPU values
  int64_t
      dim_stride;  // from one head dimension to the next: block_size for CPU keys, 1 for CPU values
};

// One request's row of the block table.
struct BlockRow {
  const int32_t* blocks;  // physical block of each logical block
  int64_t block_size;     // slots in a block
};

// Elements from `KvPlane::data` to (slot, kv_head, dim 0). 64 bits: a cache easily holds more than
// 2^31 elements.
ECHO_HD int64_t slot_offset(const KvPlane& plane, const BlockRow& row, int64_t kv_head,
                            int64_t slot) {
  const int64_t block = row.blocks[slot / row.block_size];
  return block * plane.block_stride + kv_head * plane.head_stride +
         (slot % row.block_size) * plane.slot_stride;
}

}  // namespace vllm_echo
