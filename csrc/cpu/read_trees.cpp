// SPDX-License-Identifier: Apache-2.0
#include "../include/read_trees.h"

#include <torch/csrc/stable/ops.h>

#include "checks.h"
#include "ops.h"
#include "tensors.h"

namespace vllm_echo::cpu {

std::tuple<Tensor, Tensor> read_trees(const Tensor& tokens, const Tensor& parents,
                                      const Tensor& depths, const Tensor& num_nodes,
                                      const Tensor& slots, const Tensor& scheduled,
                                      const Tensor& num_scheduled) {
  require_int32(tokens, "read_trees: tokens", 2);
  require_int32(parents, "read_trees: parents", 2);
  require_int32(depths, "read_trees: depths", 2);
  require_int32(num_nodes, "read_trees: num_nodes", 1);
  require_tensor(slots, "read_trees: slots", ScalarType::Long, "int64", 1);
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
  for (int64_t r = 0; r < num_requests; ++r) {
    const TreeToRead tree{row_of<int32_t>(tokens, slot[r]),
                          row_of<int32_t>(parents, slot[r]),
                          row_of<int32_t>(depths, slot[r]),
                          const_data<int32_t>(num_nodes)[slot[r]],
                          row_of<int32_t>(scheduled, r),
                          const_data<int32_t>(num_scheduled)[r],
                          width,
                          row_of<int32_t>(out_parents, r),
                          row_of<int32_t>(out_depths, r)};
    read_tree(tree);
  }
  return {out_parents, out_depths};
}

}  // namespace vllm_echo::cpu
