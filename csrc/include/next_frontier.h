// SPDX-License-Identifier: Apache-2.0
// The next frontier: one request's best candidates of a layer become the nodes to expand.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "rank_key.h"

namespace vllm_echo {

// One request.
struct LayerToExpand {
  const uint64_t* ranked;     // [width] keys of the layer's candidates, the best first
  const int32_t* tokens;      // [candidates of the layer]
  int64_t width;              // nodes to expand
  int64_t children;           // candidates of one parent; they lie parent by parent
  int64_t first_parent_row;   // of the previous forward
  const uint64_t* ancestors;  // [parents, num_words] those of the parents; null: they are roots
  const uint64_t* own_bits;   // [width, num_words]
  int64_t num_words;
  int32_t* out_tokens;      // [width]
  int64_t* parent_rows;     // [width] row of the parent in the previous forward
  uint64_t* out_ancestors;  // [width, num_words] the parent's, and the own bit
  int64_t* columns;         // [width] column in the layer
  float* out_scores;        // [width]
};

ECHO_HD void expand_best(const LayerToExpand& layer) {
  const int64_t words = layer.num_words;
  for (int64_t node = 0; node < layer.width; ++node) {
    const int64_t column = key_index(layer.ranked[node]);
    const int64_t parent = column / layer.children;
    layer.out_tokens[node] = layer.tokens[column];
    layer.parent_rows[node] = layer.first_parent_row + parent;
    layer.columns[node] = column;
    layer.out_scores[node] = key_value(layer.ranked[node]);
    for (int64_t word = 0; word < words; ++word) {
      const uint64_t above = layer.ancestors ? layer.ancestors[parent * words + word] : 0;
      layer.out_ancestors[node * words + word] = above | layer.own_bits[node * words + word];
    }
  }
}

}  // namespace vllm_echo
