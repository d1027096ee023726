// SPDX-License-Identifier: Apache-2.0
// Reading back: one request's stored tree, if its leading tokens are those that were scheduled.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace vllm_echo {

// One request.
struct TreeToRead {
  const int32_t* tokens;     // [width] as stored, like the next two
  const int32_t* parents;    // [width]
  const int32_t* depths;     // [width]
  int64_t num_nodes;         // stored
  const int32_t* scheduled;  // [width] tokens
  int64_t num_scheduled;     // leading ones that count
  int64_t width;
  int32_t* out_parents;  // [width]
  int32_t* out_depths;   // [width]
};

ECHO_HD bool was_scheduled(const TreeToRead& tree) {
  if (tree.num_scheduled > tree.num_nodes) return false;
  const int64_t end = tree.num_scheduled < tree.width ? tree.num_scheduled : tree.width;
  for (int64_t node = 0; node < end; ++node) {
    if (tree.tokens[node] != tree.scheduled[node]) return false;
  }
  return true;
}

// Tokens that are not the stored tree's are taken as a chain, which is valid whatever they are.
ECHO_HD void read_tree(const TreeToRead& tree) {
  const bool known = was_scheduled(tree);
  for (int64_t node = 0; node < tree.width; ++node) {
    tree.out_parents[node] = known ? tree.parents[node] : static_cast<int32_t>(node - 1);
    tree.out_depths[node] = known ? tree.depths[node] : static_cast<int32_t>(node + 1);
  }
}

}  // namespace vllm_echo
