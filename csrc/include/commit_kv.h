// SPDX-License-Identifier: Apache-2.0
// The moves that put the KV of an accepted path into the linear prefix of its request.
//
// Node row i of a tree was computed at slot root + i; the path's k-th node must live at root + k.
// Rows of a path increase strictly and the k-th is at least k. So ascending moves never overwrite a
// row still to be read, and once a row is out of place, so are all behind it.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "paged_kv.h"

namespace vllm_echo {

// One request's accepted path.
struct CommitPath {
  BlockRow blocks;      // the request's block table row
  int64_t root_slot;    // logical slot of the root
  const int32_t* rows;  // row of the path's k-th node at rows[k - 1]
  int64_t length;       // nodes on the path, without the root
};

// Nodes at the start of the path that already lie in place.
ECHO_HD int64_t num_rows_in_place(const CommitPath& path) {
  int64_t k = 0;
  while (k < path.length && path.rows[k] == k + 1) ++k;
  return k;
}

// Moves head dimensions first_dim, first_dim + dim_step, ... of every misplaced row; a CPU takes
// all (0, 1), a CUDA thread its share. `Element` has the cache's element size: bits are copied.
template <typename Element>
ECHO_HD void commit_dims(const KvPlane& plane, const CommitPath& path, int64_t kv_head,
                         int64_t head_dim, int64_t first_dim, int64_t dim_step) {
  Element* data = reinterpret_cast<Element*>(plane.data);
  for (int64_t k = num_rows_in_place(path); k < path.length; ++k) {
    const int64_t from = slot_offset(plane, path.blocks, kv_head, path.root_slot + path.rows[k]);
    const int64_t to = slot_offset(plane, path.blocks, kv_head, path.root_slot + k + 1);
    for (int64_t dim = first_dim; dim < head_dim; dim += dim_step) {
      data[to + dim * plane.dim_stride] = data[from + dim * plane.dim_stride];
    }
  }
}

}  // namespace vllm_echo
