// SPDX-License-Identifier: Apache-2.0
#include "../include/next_frontier.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "checks.h"
#include "ops.h"
#include "tensors.h"

namespace vllm_echo::cpu {
namespace {

void require_int64(const Tensor& tensor, const char* what, int64_t num_dims) {
  require_tensor(tensor, what, ScalarType::Long, "int64", num_dims);
}

void require_ascending(const Tensor& requests, const char* what) {
  const int64_t* values = const_data<int64_t>(requests);
  for (int64_t i = 1; i < requests.size(0); ++i) {
    require(values[i] > values[i - 1], what, " must ascend, got ", values[i - 1], " before ",
            values[i]);
  }
}

// Where each request stands in the previous frontier. Both lists ascend.
std::vector<int64_t> places_in(const Tensor& previous, const Tensor& requests) {
  const int64_t* known = const_data<int64_t>(previous);
  const int64_t* end = known + previous.size(0);
  std::vector<int64_t> places(requests.size(0));
  const int64_t* place = known;
  for (size_t a = 0; a < places.size(); ++a) {
    const int64_t request = const_data<int64_t>(requests)[a];
    while (place != end && *place < request) ++place;
    require(place != end && *place == request, "next_frontier: requests names request ", request,
            ", which is not in previous_requests");
    places[a] = place - known;
  }
  return places;
}

// The `keys.size()` candidates of a row; the best `width` come first.
void rank_best(const float* scores, int64_t width, std::vector<uint64_t>& keys) {
  for (size_t c = 0; c < keys.size(); ++c) {
    const bool unusable = std::isnan(scores[c]);
    keys[c] = rank_key(unusable ? -std::numeric_limits<float>::infinity() : scores[c], c);
  }
  std::partial_sort(keys.begin(), keys.begin() + width, keys.end());
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> next_frontier(
    const Tensor& tokens, const Tensor& scores, const Tensor& requests, const Tensor& own_bits,
    int64_t top_k, std::optional<Tensor> previous_requests, std::optional<Tensor> ancestors) {
  require_int32(tokens, "next_frontier: tokens", 2);
  require_tensor(scores, "next_frontier: scores", ScalarType::Float, "float32", 2);
  require_int64(requests, "next_frontier: requests", 1);
  require_int64(own_bits, "next_frontier: own_bits", 2);
  const int64_t num_columns = tokens.size(1);
  const int64_t num_active = requests.size(0);
  const int64_t width = own_bits.size(0);
  const int64_t num_words = own_bits.size(1);
  require_size(scores, "next_frontier: scores", 0, tokens.size(0));
  require_size(scores, "next_frontier: scores", 1, num_columns);
  require(own_bits.is_contiguous(), "next_frontier: own_bits must be contiguous");
  require(width <= num_columns, "next_frontier: own_bits names ", width,
          " nodes to expand, but tokens has ", num_columns, " columns");
  require(num_columns <= kMaxRanked, "next_frontier: tokens must have fewer columns, got ",
          num_columns);
  require(top_k >= 1, "next_frontier: top_k must be positive, got ", top_k);
  require_ascending(requests, "next_frontier: requests");
  const int64_t* active = const_data<int64_t>(requests);
  for (int64_t a = 0; a < num_active; ++a) {
    require(active[a] >= 0 && active[a] < tokens.size(0), "next_frontier: requests names request ",
            active[a], " of ", tokens.size(0));
  }
  require(previous_requests.has_value() == ancestors.has_value(),
          "next_frontier: previous_requests and ancestors must come together");
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
    require_ascending(*previous_requests, "next_frontier: previous_requests");
    places = places_in(*previous_requests, requests);
  }

  Tensor out_tokens = new_tensor(tokens, {num_active, width}, ScalarType::Int);
  Tensor parent_rows = new_tensor(tokens, {num_active, width}, ScalarType::Long);
  Tensor out_ancestors = new_tensor(tokens, {num_active, width, num_words}, ScalarType::Long);
  Tensor columns = new_tensor(tokens, {num_active, width}, ScalarType::Long);
  Tensor out_scores = new_tensor(tokens, {num_active, width}, ScalarType::Float);
  const int64_t num_parents = ancestors ? ancestors->size(1) : 1;
  std::vector<uint64_t> keys(num_columns);
  for (int64_t a = 0; a < num_active; ++a) {
    rank_best(const_data<float>(scores) + active[a] * scores.stride(0), width, keys);
    const int64_t parent_row = ancestors ? places[a] * num_parents : active[a];
    const uint64_t* above =
        ancestors ? const_data<uint64_t>(*ancestors) + parent_row * num_words : nullptr;
    const LayerToExpand layer{keys.data(),
                              const_data<int32_t>(tokens) + active[a] * tokens.stride(0),
                              width,
                              ancestors ? top_k : std::max<int64_t>(num_columns, 1),
                              parent_row,
                              above,
                              const_data<uint64_t>(own_bits),
                              num_words,
                              data<int32_t>(out_tokens) + a * width,
                              data<int64_t>(parent_rows) + a * width,
                              data<uint64_t>(out_ancestors) + a * width * num_words,
                              data<int64_t>(columns) + a * width,
                              data<float>(out_scores) + a * width};
    expand_best(layer);
  }
  return {out_tokens, parent_rows, out_ancestors, columns, out_scores};
}

}  // namespace vllm_echo::cpu
