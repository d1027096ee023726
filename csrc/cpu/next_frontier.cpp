// SPDX-License-Identifier: Apache-2.0
#include "../include/next_frontier.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../common/checks.h"
#include "../common/tensors.h"
#include "ops.h"

namespace vllm_echo::cpu {
namespace {

// The requests that `active` marks, in order.
std::vector<int64_t> marked(const Tensor& active) {
  std::vector<int64_t> requests;
  const bool* is_active = const_data<bool>(active);
  for (int64_t r = 0, end = active.size(0); r < end; ++r) {
    if (is_active[r]) requests.push_back(r);
  }
  return requests;
}

// Where each request stands in the previous frontier. Both lists ascend.
std::vector<int64_t> places_in(const Tensor& previous, const std::vector<int64_t>& requests) {
  const int64_t* known = const_data<int64_t>(previous);
  const int64_t* end = known + previous.size(0);
  std::vector<int64_t> places;
  const int64_t* place = known;
  for (const int64_t request : requests) {
    while (place != end && *place < request) ++place;
    require(place != end && *place == request, "next_frontier: active names request ", request,
            ", which is not in previous_requests");
    places.push_back(place - known);
  }
  return places;
}

// The `keys.size()` candidates of a row; the best `width` come first.
void rank_best(const float* scores, int64_t width, std::vector<uint64_t>& keys) {
  for (size_t c = 0; c < keys.size(); ++c) {
    const bool unusable = std::isnan(scores[c]);
    keys[c] = rank_key(unusable ? -std::numeric_limits<float>::infinity() : scores[c], c);
  }
  if (width == 1) {
    keys[0] = *std::min_element(keys.begin(), keys.end());  // most layers expand one node
  } else {
    std::partial_sort(keys.begin(), keys.begin() + width, keys.end());
  }
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> next_frontier(
    const Tensor& tokens, const Tensor& scores, const Tensor& active, const Tensor& own_bits,
    int64_t top_k, std::optional<Tensor> previous_requests, std::optional<Tensor> ancestors) {
  require_int32(tokens, "next_frontier: tokens", 2);
  require_float32(scores, "next_frontier: scores", 2);
  require_bool(active, "next_frontier: active", 1);
  require_int64(own_bits, "next_frontier: own_bits", 2);
  const int64_t num_columns = tokens.size(1);
  const int64_t width = own_bits.size(0);
  const int64_t num_words = own_bits.size(1);
  require_size(scores, "next_frontier: scores", 0, tokens.size(0));
  require_size(scores, "next_frontier: scores", 1, num_columns);
  require_size(active, "next_frontier: active", 0, tokens.size(0));
  require(own_bits.is_contiguous(), "next_frontier: own_bits must be contiguous");
  require(width <= num_columns, "next_frontier: own_bits names ", width,
          " nodes to expand, but tokens has ", num_columns, " columns");
  require(num_columns <= kMaxRanked, "next_frontier: tokens must have fewer columns, got ",
          num_columns);
  require(top_k >= 1, "next_frontier: top_k must be positive, got ", top_k);
  require(previous_requests.has_value() == ancestors.has_value(),
          "next_frontier: previous_requests and ancestors must come together");
  const std::vector<int64_t> expanded = marked(active);
  const int64_t num_active = static_cast<int64_t>(expanded.size());
  std::vector<int64_t> places;
  if (ancestors) {
    require_int64(*previous_requests, "next_frontier: previous_requests", 1);
    require_int64(*ancestors, "next_frontier: ancestors", 3);
    require_size(*ancestors, "next_frontier: ancestors", 0, previous_requests->size(0));
    require_size(*ancestors, "next_frontier: ancestors", 2, num_words);
    require(ancestors->is_contiguous(), "next_frontier: ancestors must be contiguous");
    require(num_columns == 0 || (num_columns - 1) / top_k < ancestors->size(1),
            "next_frontier: tokens has ", num_columns, " columns, but ancestors has ",
            ancestors->size(1), " parents with ", top_k, " children each");
    require_ascending_rows(*previous_requests, "next_frontier: previous_requests", tokens.size(0));
    places = places_in(*previous_requests, expanded);
  }

  Tensor requests = new_tensor(tokens, {num_active}, ScalarType::Long);
  std::copy(expanded.begin(), expanded.end(), data<int64_t>(requests));
  Tensor out_tokens = new_tensor(tokens, {num_active, width}, ScalarType::Int);
  Tensor parent_rows = new_tensor(tokens, {num_active, width}, ScalarType::Long);
  Tensor out_ancestors = new_tensor(tokens, {num_active, width, num_words}, ScalarType::Long);
  Tensor columns = new_tensor(tokens, {num_active, width}, ScalarType::Long);
  Tensor out_scores = new_tensor(tokens, {num_active, width}, ScalarType::Float);
  const int64_t num_parents = ancestors ? ancestors->size(1) : 1;
  std::vector<uint64_t> keys(num_columns);
  const Rows<int32_t> token_rows(tokens);
  const Rows<float> score_rows(scores);
  const uint64_t* above = ancestors ? const_data<uint64_t>(*ancestors) : nullptr;
  const uint64_t* own = const_data<uint64_t>(own_bits);
  int32_t* to_tokens = data<int32_t>(out_tokens);
  int64_t* to_parents = data<int64_t>(parent_rows);
  uint64_t* to_ancestors = data<uint64_t>(out_ancestors);
  int64_t* to_columns = data<int64_t>(columns);
  float* to_scores = data<float>(out_scores);
  for (int64_t a = 0; a < num_active; ++a) {
    rank_best(score_rows[expanded[a]], width, keys);
    const int64_t parent_row = above ? places[a] * num_parents : expanded[a];
    const LayerToExpand layer{keys.data(),
                              token_rows[expanded[a]],
                              width,
                              above ? top_k : std::max<int64_t>(num_columns, 1),
                              parent_row,
                              above ? above + parent_row * num_words : nullptr,
                              own,
                              num_words,
                              to_tokens + a * width,
                              to_parents + a * width,
                              to_ancestors + a * width * num_words,
                              to_columns + a * width,
                              to_scores + a * width};
    expand_best(layer);
  }
  return {requests, out_tokens, parent_rows, out_ancestors, columns, out_scores};
}

}  // namespace vllm_echo::cpu
