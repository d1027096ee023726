// SPDX-License-Identifier: Apache-2.0
// Flattening: one request's tree becomes the rows of a super-tree, the root first.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "tree_mask.h"

namespace vllm_echo {

// One request. Inputs are its nodes in order; outputs start at its own root row.
struct TreeToPack {
  const int32_t* tokens;   // [num_nodes]
  const int32_t* parents;  // [num_nodes] -1 for children of the root, else a smaller node
  const int32_t* depths;   // [num_nodes]
  int64_t num_nodes;
  int64_t num_words;     // of an ancestor row: 1 + num_nodes bits fit
  int32_t* out_tokens;   // [num_nodes + 1] -1 at the root
  int32_t* out_parents;  // [num_nodes + 1] local row of the parent, -1 at the root
  int32_t* out_depths;   // [num_nodes + 1] 0 at the root
  uint64_t* ancestors;   // [num_nodes + 1, num_words] bit j: the row attends to local row j
};

// Returns the first node whose parent does not lie before it, or -1 when there is none. Bits go
// from parent to child, so one pass in order is enough.
ECHO_HD int64_t pack_tree(const TreeToPack& tree) {
  const int64_t words = tree.num_words;
  tree.out_tokens[0] = -1;
  tree.out_parents[0] = -1;
  tree.out_depths[0] = 0;
  for (int64_t word = 0; word < words; ++word) tree.ancestors[word] = word == 0;
  for (int64_t node = 0; node < tree.num_nodes; ++node) {
    const int64_t parent = tree.parents[node];
    if (parent < -1 || parent >= node) return node;
    const int64_t row = node + 1;
    tree.out_tokens[row] = tree.tokens[node];
    tree.out_parents[row] = static_cast<int32_t>(parent + 1);
    tree.out_depths[row] = tree.depths[node];
    uint64_t* bits = tree.ancestors + row * words;
    const uint64_t* above = tree.ancestors + (parent + 1) * words;
    for (int64_t word = 0; word < words; ++word) bits[word] = above[word];
    bits[row / kMaskWordBits] |= uint64_t{1} << (row % kMaskWordBits);
  }
  return -1;
}

}  // namespace vllm_echo
