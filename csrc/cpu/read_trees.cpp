// SPDX-License-Identifier: Apache-2.0
#include "../include/read_trees.h"

#include <torch/csrc/stable/ops.h>

#include "../common/checks.h"
#include "../common/tensors.h"
#include "ops.h"

namespace vllm_echo::cpu {

std::tuple<Tensor, Tensor> read_trees(const Tensor& tokens, const Tensor& parents,
                                      const Tensor& depths, const Tensor& num_nodes,
                                      const Tensor& slots, const Tensor& scheduled,
                                      const Tensor& num_scheduled) {
  require_int32(tokens, "read_trees: tokens", 2);
  require_int32(parents, "read_trees: parents", 2);
  require_int32(depths, "read_trees: depths", 2);
  require_int32(num_nodes, "read_trees: num_nodes", 1);
  require_int64(slots, "read_trees: slots", 1);
  require_int32(scheduled, "read_trees: scheduled", 2);
  require_int32(num_scheduled, "read_trees: num_scheduled", 1);
  const int64_t num_slots = tokens.size(0);
  const int64_t num_requests = slots.size(0);
  const int64_t width = scheduled.size(1);
  for (const auto& [tensor, what] :
       {std::pair<const Tensor&, const char*>{parents, "read_trees: parents"},
        std::pair<const Tensor&, const char*>{depths, "read_trees: depths"}}) {
    require_size(tensor, what, 0, num_slots);
    require_size(tensor, what, 1, tokens.size(1));
  }
  require_size(num_nodes, "read_trees: num_nodes", 0, num_slots);
  require_size(scheduled, "read_trees: scheduled", 0, num_requests);
  require_size(num_scheduled, "read_trees: num_scheduled", 0, num_requests);
  require(width <= tokens.size(1), "read_trees: scheduled has ", width,
          " columns, but tokens has room for ", tokens.size(1), " nodes");
  const int64_t* slot = const_data<int64_t>(slots);
  for (int64_t r = 0; r < num_requests; ++r) {
    require(slot[r] >= 0 && slot[r] < num_slots, "read_trees: slots names slot ", slot[r], " of ",
            num_slots, " for request ", r);
  }

  const std::vector<int64_t> sizes{num_requests, width};
  Tensor out_parents = torch::stable::new_empty(tokens, sizes, ScalarType::Int);
  Tensor out_depths = torch::stable::new_empty(tokens, sizes, ScalarType::Int);
  const Rows<int32_t> stored_tokens(tokens);
  const Rows<int32_t> stored_parents(parents);
  const Rows<int32_t> stored_depths(depths);
  const Rows<int32_t> tokens_to_read(scheduled);
  const Rows<int32_t> to_parents(out_parents);
  const Rows<int32_t> to_depths(out_depths);
  const int32_t* num_stored = const_data<int32_t>(num_nodes);
  const int32_t* num_to_read = const_data<int32_t>(num_scheduled);
  for (int64_t r = 0; r < num_requests; ++r) {
    const TreeToRead tree{stored_tokens[slot[r]],
                          stored_parents[slot[r]],
                          stored_depths[slot[r]],
                          num_stored[slot[r]],
                          tokens_to_read[r],
                          num_to_read[r],
                          width,
                          to_parents[r],
                          to_depths[r]};
    read_tree(tree);
  }
  return {out_parents, out_depths};
}

}  // namespace vllm_echo::cpu
