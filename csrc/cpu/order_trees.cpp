// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "../common/checks.h"
#include "../common/tensors.h"
#include "../include/order_nodes.h"
#include "../include/rank_trees.h"
#include "ops.h"

namespace vllm_echo::cpu {
namespace {

// What a layer that is not drafted, or a score that is no number, counts as.
constexpr float kNoCandidate = -std::numeric_limits<float>::infinity();

void find_best(const float* scores, const int32_t* depths, int64_t num_candidates,
               std::vector<float>& best) {
  std::fill(best.begin(), best.end(), kNoCandidate);
  for (int64_t c = 0; c < num_candidates; ++c) {
    const int64_t layer = int64_t{depths[c]} - 1;
    if (layer < 0 || layer >= static_cast<int64_t>(best.size())) continue;
    if (scores[c] > best[layer]) best[layer] = scores[c];
  }
}

// The best first. Most of what is no candidate is in its place already.
void rank_row(const float* scores, const int32_t* depths, int64_t last_layer,
              std::vector<uint64_t>& keys, std::vector<uint64_t>& others) {
  size_t num_candidates = 0;
  others.clear();
  for (size_t c = 0; c < keys.size(); ++c) {
    const bool counts = depths[c] <= last_layer && scores[c] > kNoCandidate;
    if (counts) {
      keys[num_candidates++] = rank_key(scores[c], c);
    } else {
      others.push_back(rank_key(kNoCandidate, c));
    }
  }
  std::sort(keys.begin(), keys.begin() + num_candidates);
  std::copy(others.begin(), others.end(), keys.begin() + num_candidates);
}

void require_tables(const Tensor& tokens, const Tensor& parents, const Tensor& depths,
                    const Tensor& scores) {
  require_int32(tokens, "order_trees: tokens", 2);
  require_int32(parents, "order_trees: parents", 2);
  require_int32(depths, "order_trees: depths", 2);
  require_float32(scores, "order_trees: scores", 2);
  for (const auto& [tensor, what] :
       {std::pair<const Tensor&, const char*>{parents, "order_trees: parents"},
        std::pair<const Tensor&, const char*>{depths, "order_trees: depths"},
        std::pair<const Tensor&, const char*>{scores, "order_trees: scores"}}) {
    require_size(tensor, what, 0, tokens.size(0));
    require_size(tensor, what, 1, tokens.size(1));
  }
  require(tokens.size(1) <= std::numeric_limits<int32_t>::max(),
          "order_trees: tokens must have fewer columns, got ", tokens.size(1));
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> order_trees(const Tensor& tokens, const Tensor& parents,
                                                       const Tensor& depths, const Tensor& scores,
                                                       const Tensor& caps, const Tensor& deepest,
                                                       const Tensor& thresholds, int64_t rule,
                                                       bool width, int64_t max_nodes) {
  require_tables(tokens, parents, depths, scores);
  require_int32(caps, "order_trees: caps", 1);
  require_int32(deepest, "order_trees: deepest", 1);
  require_float32(thresholds, "order_trees: thresholds", 1);
  const int64_t num_requests = tokens.size(0);
  const int64_t num_candidates = tokens.size(1);
  require_size(caps, "order_trees: caps", 0, num_requests);
  require_size(deepest, "order_trees: deepest", 0, num_requests);
  require(rule >= 0 && rule <= static_cast<int64_t>(Rule::kShares),
          "order_trees: rule must be 0 (gates), 1 (price) or 2 (shares), got ", rule);
  require(max_nodes >= 0 && max_nodes <= kMaxTurns, "order_trees: max_nodes must be 0 to ",
          kMaxTurns, ", got ", max_nodes);
  require(num_requests * max_nodes <= kMaxPlaces, "order_trees: at most ", kMaxPlaces,
          " nodes can be ordered, got ", num_requests, " requests of ", max_nodes);

  Tensor out_tokens = new_tensor(tokens, {num_requests, max_nodes}, ScalarType::Int);
  Tensor out_parents = new_tensor(tokens, {num_requests, max_nodes}, ScalarType::Int);
  Tensor out_depths = new_tensor(tokens, {num_requests, max_nodes}, ScalarType::Int);
  Tensor out_keys = new_tensor(tokens, {num_requests, max_nodes}, ScalarType::Long);
  const int64_t num_kept = std::min(max_nodes, num_candidates);
  std::vector<float> best(thresholds.size(0));
  std::vector<uint64_t> ranked(num_candidates);
  std::vector<uint64_t> others;
  std::vector<int32_t> places(num_candidates);
  std::vector<float> kept_scores(num_kept);
  const Rows<int32_t> from_tokens(tokens);
  const Rows<int32_t> from_parents(parents);
  const Rows<int32_t> from_depths(depths);
  const Rows<float> from_scores(scores);
  const Rows<int32_t> to_tokens(out_tokens);
  const Rows<int32_t> to_parents(out_parents);
  const Rows<int32_t> to_depths(out_depths);
  const Rows<int64_t> to_keys(out_keys);
  const int32_t* most = const_data<int32_t>(caps);
  const int32_t* last = const_data<int32_t>(deepest);
  const float* gates = const_data<float>(thresholds);
  for (int64_t r = 0; r < num_requests; ++r) {
    Reach reach{0, most[r] > 0 ? std::max(last[r], 1) : 0, false};
    if (Rule{rule} == Rule::kGates) {
      find_best(from_scores[r], from_depths[r], num_candidates, best);
      reach = pass_gates({best.data(), gates, thresholds.size(0), most[r], last[r]});
    }
    rank_row(from_scores[r], from_depths[r], reach.last_layer, ranked, others);
    const TreeToRank tree{ranked.data(),  from_tokens[r], from_parents[r], from_depths[r],
                          num_candidates, num_kept,       places.data(),   to_tokens[r],
                          to_parents[r],  to_depths[r]};
    const int64_t broken = rank_tree(tree);
    require(broken < 0, "order_trees: parents of request ", r, ": that of candidate ", broken,
            " is none of its ", num_candidates, " candidates");
    const NodesToOrder nodes{Rule{rule}, width,       ranked.data(), num_kept,
                             most[r],    best.data(), reach,         r * max_nodes};
    for (int64_t rank = 0; rank < num_kept; ++rank) to_keys[r][rank] = key_of_node(nodes, rank);
    std::fill(to_tokens[r] + num_kept, to_tokens[r] + max_nodes, 0);
    std::fill(to_parents[r] + num_kept, to_parents[r] + max_nodes, -1);
    std::fill(to_depths[r] + num_kept, to_depths[r] + max_nodes, 0);
    std::fill(to_keys[r] + num_kept, to_keys[r] + max_nodes, kNoNode);
  }
  return {out_tokens, out_parents, out_depths, out_keys};
}

}  // namespace vllm_echo::cpu
