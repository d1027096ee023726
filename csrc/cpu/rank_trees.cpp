// SPDX-License-Identifier: Apache-2.0
#include "../include/rank_trees.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../common/checks.h"
#include "../common/tensors.h"
#include "ops.h"

namespace vllm_echo::cpu {
namespace {

void rank_row(const float* scores, std::vector<uint64_t>& keys) {
  for (size_t c = 0; c < keys.size(); ++c) {
    const bool unusable = std::isnan(scores[c]);
    keys[c] = rank_key(unusable ? -std::numeric_limits<float>::infinity() : scores[c], c);
  }
  std::sort(keys.begin(), keys.end());
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> rank_trees(const Tensor& tokens, const Tensor& parents,
                                                      const Tensor& depths, const Tensor& scores,
                                                      int64_t max_nodes) {
  require_int32(tokens, "rank_trees: tokens", 2);
  require_int32(parents, "rank_trees: parents", 2);
  require_int32(depths, "rank_trees: depths", 2);
  require_float32(scores, "rank_trees: scores", 2);
  const int64_t num_requests = tokens.size(0);
  const int64_t num_candidates = tokens.size(1);
  for (const auto& [tensor, what] :
       {std::pair<const Tensor&, const char*>{parents, "rank_trees: parents"},
        std::pair<const Tensor&, const char*>{depths, "rank_trees: depths"},
        std::pair<const Tensor&, const char*>{scores, "rank_trees: scores"}}) {
    require_size(tensor, what, 0, num_requests);
    require_size(tensor, what, 1, num_candidates);
  }
  require(max_nodes >= 0, "rank_trees: max_nodes must not be negative, got ", max_nodes);
  require(num_candidates <= std::numeric_limits<int32_t>::max(),
          "rank_trees: tokens must have fewer columns, got ", num_candidates);

  const int64_t num_kept = std::min(max_nodes, num_candidates);
  Tensor out_tokens = new_tensor(tokens, {num_requests, num_kept}, ScalarType::Int);
  Tensor out_parents = new_tensor(tokens, {num_requests, num_kept}, ScalarType::Int);
  Tensor out_depths = new_tensor(tokens, {num_requests, num_kept}, ScalarType::Int);
  Tensor out_scores = new_tensor(tokens, {num_requests, num_kept}, ScalarType::Float);
  std::vector<uint64_t> keys(num_candidates);
  std::vector<int32_t> places(num_candidates);
  const Rows<int32_t> from_tokens(tokens);
  const Rows<int32_t> from_parents(parents);
  const Rows<int32_t> from_depths(depths);
  const Rows<float> from_scores(scores);
  const Rows<int32_t> to_tokens(out_tokens);
  const Rows<int32_t> to_parents(out_parents);
  const Rows<int32_t> to_depths(out_depths);
  const Rows<float> to_scores(out_scores);
  for (int64_t r = 0; r < num_requests; ++r) {
    rank_row(from_scores[r], keys);
    const TreeToRank tree{keys.data(),    from_tokens[r], from_parents[r], from_depths[r],
                          num_candidates, num_kept,       places.data(),   to_tokens[r],
                          to_parents[r],  to_depths[r],   to_scores[r]};
    const int64_t broken = rank_tree(tree);
    require(broken < 0, "rank_trees: parents of request ", r, ": that of candidate ", broken,
            " is none of its ", num_candidates, " candidates");
  }
  return {out_tokens, out_parents, out_depths, out_scores};
}

}  // namespace vllm_echo::cpu
