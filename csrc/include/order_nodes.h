// SPDX-License-Identifier: Apache-2.0
// Admission order: one request's ranked candidates become keys, and the budget of a step takes the
// first keys of all requests. No request looks at another here.
#pragma once

#include <cmath>
#include <cstdint>

#include "grants.h"
#include "host_device.h"
#include "node_key.h"
#include "probability.h"

namespace vllm_echo {

// As vllm_echo/core/decision.py has them.
enum class Rule : int64_t {
  kGates = 0,   // depth first, then width: echo and its relatives
  kPrice = 1,   // the likeliest first: goodput
  kShares = 2,  // in turns of one node each: the fixed shapes
};

// What a request may have, and what decides about it. `best`, the highest score of each layer, is
// overwritten by the confidences of the layers that are paid for.
struct Layers {
  float* best;              // [num_depths]
  const float* thresholds;  // [num_depths] the gate at each depth; NaN: none
  int64_t num_depths;
  int64_t cap;      // most nodes
  int64_t deepest;  // last layer
};

// What came of it.
struct Reach {
  int64_t paid;        // layers that phase 1 buys, one node each, if the budget lasts
  int64_t last_layer;  // candidates below it would not have been drafted
  bool truncated;      // cut by a gate
};

// Phase 1 of one request: layer after layer while its own gates let it pass.
ECHO_HD Reach pass_gates(const Layers& layers) {
  Reach reach{0, layers.cap > 0 ? 1 : 0, false};
  for (int64_t depth = 0; depth < layers.num_depths && reach.last_layer == depth + 1; ++depth) {
    if (!takes_part(true, layers.best[depth])) break;
    const float confidence = probability(layers.best[depth]);
    const float threshold = layers.thresholds[depth];
    if (threshold == threshold && !(confidence > threshold)) {
      reach.truncated = true;
      break;
    }
    if (reach.paid >= layers.cap) break;
    layers.best[depth] = confidence;
    ++reach.paid;
    if (depth + 1 < layers.deepest && depth + 1 < layers.num_depths) reach.last_layer = depth + 2;
  }
  return reach;
}

// One request.
struct NodesToOrder {
  Rule rule;
  bool width;              // kGates: nodes beyond those of phase 1, too
  const uint64_t* ranked;  // [num_nodes] keys of its best candidates by score, the best first
  int64_t num_nodes;
  int64_t cap;
  const float* confidence;  // kGates: [paid] of the layers that are paid for
  Reach reach;              // kGates
  int64_t first_place;      // of its keys in the table of all
};

// The key of the node of that rank: what the request's budget grows by one for. Keys ascend.
ECHO_HD int64_t key_of_node(const NodesToOrder& nodes, int64_t rank) {
  if (rank >= nodes.cap) return kNoNode;
  const float score = key_value(nodes.ranked[rank]);
  const int64_t place = nodes.first_place + rank;
  const bool possible = score > -INFINITY && score < INFINITY;
  switch (nodes.rule) {
    case Rule::kGates:
      if (rank < nodes.reach.paid) return node_key(rank, nodes.confidence[rank], place);
      if (!nodes.width || !possible) return kNoNode;
      return node_key(nodes.reach.truncated ? kWidthOfTruncated : kWidthOfOthers, score, place);
    case Rule::kPrice: {
      const float worth = probability(score);
      return worth > 0 ? node_key(0, worth, place) : kNoNode;  // worth nothing is no node
    }
    case Rule::kShares:
      return possible ? node_key(rank, 0.0f, place) : kNoNode;
  }
  return kNoNode;
}

}  // namespace vllm_echo
