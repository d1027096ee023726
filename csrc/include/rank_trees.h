// SPDX-License-Identifier: Apache-2.0
// Ranking: one request's candidates, in any order, become the best ones in theirs.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "rank_key.h"

namespace vllm_echo {

// One request.
struct TreeToRank {
  const uint64_t* ranked;  // [num_candidates] keys of all candidates, the best first
  const int32_t* tokens;   // [num_candidates]
  const int32_t* parents;  // [num_candidates] -1 for children of the root, else a candidate
  const int32_t* depths;   // [num_candidates]
  int64_t num_candidates;
  int64_t num_kept;      // the best ones; at most num_candidates
  int32_t* places;       // [num_candidates] scratch
  int32_t* out_tokens;   // [num_kept]
  int32_t* out_parents;  // [num_kept] place of the parent among the ranked, -1 for the root
  int32_t* out_depths;   // [num_kept]
};

// Returns the first kept candidate whose parent is none of the candidates, or -1 when there is
// none.
ECHO_HD int64_t rank_tree(const TreeToRank& tree) {
  for (int64_t place = 0; place < tree.num_candidates; ++place) {
    tree.places[key_index(tree.ranked[place])] = static_cast<int32_t>(place);
  }
  for (int64_t place = 0; place < tree.num_kept; ++place) {
    const int64_t candidate = key_index(tree.ranked[place]);
    const int64_t parent = tree.parents[candidate];
    if (parent < -1 || parent >= tree.num_candidates) return candidate;
    tree.out_tokens[place] = tree.tokens[candidate];
    tree.out_parents[place] = parent < 0 ? -1 : tree.places[parent];
    tree.out_depths[place] = tree.depths[candidate];
  }
  return -1;
}

}  // namespace vllm_echo
