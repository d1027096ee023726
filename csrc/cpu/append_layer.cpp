// SPDX-License-Identifier: Apache-2.0
#include "../include/append_layer.h"

#include <algorithm>

#include "../common/checks.h"
#include "../common/tensors.h"
#include "ops.h"

namespace vllm_echo::cpu {

Tensor append_layer(Tensor tokens, Tensor parents, Tensor scores, const Tensor& requests,
                    const Tensor& child_tokens, const Tensor& child_scores,
                    const Tensor& chain_only, std::optional<Tensor> parent_scores,
                    std::optional<Tensor> parent_columns, int64_t first_parent_column) {
  require_int32(tokens, "append_layer: tokens", 2);
  require_int32(parents, "append_layer: parents", 2);
  require_float32(scores, "append_layer: scores", 2);
  require_int64(requests, "append_layer: requests", 1);
  require_int32(child_tokens, "append_layer: child_tokens", 3);
  require_float32(child_scores, "append_layer: child_scores", 3);
  require_bool(chain_only, "append_layer: chain_only", 1);
  const int64_t num_requests = tokens.size(0);
  const int64_t num_columns = tokens.size(1);
  const int64_t num_rows = requests.size(0);
  const int64_t num_parents = child_tokens.size(1);
  const int64_t top_k = child_tokens.size(2);
  require_size(parents, "append_layer: parents", 0, num_requests);
  require_size(parents, "append_layer: parents", 1, num_columns);
  require_size(scores, "append_layer: scores", 0, num_requests);
  require_size(scores, "append_layer: scores", 1, num_columns);
  require_size(chain_only, "append_layer: chain_only", 0, num_requests);
  require_size(child_tokens, "append_layer: child_tokens", 0, num_rows);
  require(num_parents * top_k == num_columns, "append_layer: child_tokens has ", num_parents,
          " parents with ", top_k, " children, but tokens has ", num_columns, " columns");
  for (int64_t dim = 0; dim < 3; ++dim) {
    require_size(child_scores, "append_layer: child_scores", dim, child_tokens.size(dim));
  }
  require(child_tokens.is_contiguous(), "append_layer: child_tokens must be contiguous");
  require(child_scores.is_contiguous(), "append_layer: child_scores must be contiguous");
  require_ascending_rows(requests, "append_layer: requests", num_requests);
  require(parent_scores.has_value() == parent_columns.has_value(),
          "append_layer: parent_scores and parent_columns must come together");
  if (parent_scores) {
    require_float32(*parent_scores, "append_layer: parent_scores", 2);
    require_int64(*parent_columns, "append_layer: parent_columns", 2);
    require_size(*parent_scores, "append_layer: parent_scores", 0, num_rows);
    require_size(*parent_scores, "append_layer: parent_scores", 1, num_parents);
    require_size(*parent_columns, "append_layer: parent_columns", 0, num_rows);
    require_size(*parent_columns, "append_layer: parent_columns", 1, num_parents);
    require(parent_scores->is_contiguous(), "append_layer: parent_scores must be contiguous");
    require(parent_columns->is_contiguous(), "append_layer: parent_columns must be contiguous");
  }

  Tensor best = new_tensor(scores, {num_requests}, ScalarType::Float);
  float* best_of = data<float>(best);
  std::fill_n(best_of, num_requests, -std::numeric_limits<float>::infinity());
  const int64_t* request = const_data<int64_t>(requests);
  const bool* only_first = const_data<bool>(chain_only);
  const int32_t* drafted = const_data<int32_t>(child_tokens);
  const float* added = const_data<float>(child_scores);
  const float* above = parent_scores ? const_data<float>(*parent_scores) : nullptr;
  const int64_t* above_columns = parent_columns ? const_data<int64_t>(*parent_columns) : nullptr;
  const Rows<int32_t> out_tokens(tokens);
  const Rows<int32_t> out_parents(parents);
  const Rows<float> out_scores(scores);
  for (int64_t a = 0; a < num_rows; ++a) {
    const int64_t r = request[a];
    const ChildrenToAppend layer{
        drafted + a * num_columns,
        added + a * num_columns,
        num_parents,
        top_k,
        only_first[r],
        above ? above + a * num_parents : nullptr,
        above_columns ? above_columns + a * num_parents : nullptr,
        first_parent_column,
        out_tokens[r],
        out_parents[r],
        out_scores[r],
    };
    best_of[r] = append_children(layer);
  }
  return best;
}

}  // namespace vllm_echo::cpu
