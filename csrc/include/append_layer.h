// SPDX-License-Identifier: Apache-2.0
// Drafted children become candidates: one request's part of a layer.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

namespace vllm_echo {

// One request.
struct ChildrenToAppend {
  const int32_t* tokens;  // [num_parents, top_k]
  const float* scores;    // [num_parents, top_k] what a child adds to its path's score
  int64_t num_parents;
  int64_t top_k;
  bool only_first;                // one child a parent, the likeliest
  const float* parent_scores;     // [num_parents]; null: the root is the parent
  const int64_t* parent_columns;  // [num_parents] places in the layer above
  int64_t first_parent_column;    // where that layer begins
  int32_t* out_tokens;            // [num_parents * top_k], and so are the others
  int32_t* out_parents;
  float* out_scores;
};

// Returns the best path score of the layer; -inf when no child may be drafted.
ECHO_HD float append_children(const ChildrenToAppend& layer) {
  const float none = -INFINITY;
  float best = none;
  for (int64_t parent = 0; parent < layer.num_parents; ++parent) {
    const float above = layer.parent_scores ? layer.parent_scores[parent] : 0.0f;
    const int64_t column =
        layer.parent_scores ? layer.first_parent_column + layer.parent_columns[parent] : -1;
    for (int64_t child = 0; child < layer.top_k; ++child) {
      const int64_t place = parent * layer.top_k + child;
      float score = above + layer.scores[place];
      if (score != score || (layer.only_first && child > 0)) score = none;
      layer.out_tokens[place] = layer.tokens[place];
      layer.out_parents[place] = static_cast<int32_t>(column);
      layer.out_scores[place] = score;
      if (score > best) best = score;
    }
  }
  return best;
}

}  // namespace vllm_echo
