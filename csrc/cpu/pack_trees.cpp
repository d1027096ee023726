// SPDX-License-Identifier: Apache-2.0
#include "../include/pack_trees.h"

#include <algorithm>

#include "../common/checks.h"
#include "../common/tensors.h"
#include "ops.h"

namespace vllm_echo::cpu {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pack_trees(const Tensor& tokens,
                                                              const Tensor& parents,
                                                              const Tensor& depths,
                                                              const Tensor& num_nodes,
                                                              std::optional<int64_t> max_rows) {
  require_int32(tokens, "pack_trees: tokens", 2);
  require_int32(parents, "pack_trees: parents", 2);
  require_int32(depths, "pack_trees: depths", 2);
  require_int32(num_nodes, "pack_trees: num_nodes", 1);
  const int64_t num_requests = tokens.size(0);
  const int64_t width = tokens.size(1);
  for (const auto& [tensor, what] : {std::pair<const Tensor&, const char*>{parents, "parents"},
                                     std::pair<const Tensor&, const char*>{depths, "depths"}}) {
    const std::string name = std::string("pack_trees: ") + what;
    require_size(tensor, name.c_str(), 0, num_requests);
    require_size(tensor, name.c_str(), 1, width);
  }
  require_size(num_nodes, "pack_trees: num_nodes", 0, num_requests);

  const int32_t* counts = const_data<int32_t>(num_nodes);
  Tensor cu_rows = new_tensor(num_nodes, {num_requests + 1}, ScalarType::Int);
  int32_t* starts = data<int32_t>(cu_rows);
  starts[0] = 0;
  int64_t most = 0;
  for (int64_t r = 0; r < num_requests; ++r) {
    require(counts[r] >= 0 && counts[r] <= width, "pack_trees: num_nodes is ", counts[r],
            " for request ", r, ", but its tree has room for ", width);
    starts[r + 1] = starts[r] + 1 + counts[r];
    most = std::max<int64_t>(most, counts[r]);
  }
  const int64_t used_rows = starts[num_requests];
  const int64_t num_rows = max_rows.value_or(used_rows);
  require(used_rows <= num_rows, "pack_trees: max_rows is ", num_rows, ", but the trees have ",
          used_rows, " rows");
  const int64_t room = max_rows ? width : most;
  const int64_t num_words = (room + kMaskWordBits) / kMaskWordBits;  // room + 1 bits, rounded up
  Tensor out_tokens = new_tensor(tokens, {num_rows}, ScalarType::Int);
  Tensor out_parents = new_tensor(tokens, {num_rows}, ScalarType::Int);
  Tensor out_depths = new_tensor(tokens, {num_rows}, ScalarType::Int);
  Tensor ancestors = new_tensor(tokens, {num_rows, num_words}, ScalarType::Long);
  const Rows<int32_t> from_tokens(tokens);
  const Rows<int32_t> from_parents(parents);
  const Rows<int32_t> from_depths(depths);
  int32_t* to_tokens = data<int32_t>(out_tokens);
  int32_t* to_parents = data<int32_t>(out_parents);
  int32_t* to_depths = data<int32_t>(out_depths);
  uint64_t* to_ancestors = data<uint64_t>(ancestors);
  for (int64_t r = 0; r < num_requests; ++r) {
    const int64_t first = starts[r];
    const TreeToPack tree{from_tokens[r],     from_parents[r],   from_depths[r],
                          counts[r],          num_words,         to_tokens + first,
                          to_parents + first, to_depths + first, to_ancestors + first * num_words};
    const int64_t broken = pack_tree(tree);
    require(broken < 0, "pack_trees: parents of request ", r, ": that of node ", broken,
            " is not before it");
  }
  std::fill(to_tokens + used_rows, to_tokens + num_rows, -1);
  std::fill(to_parents + used_rows, to_parents + num_rows, -1);
  std::fill(to_depths + used_rows, to_depths + num_rows, 0);
  std::fill(to_ancestors + used_rows * num_words, to_ancestors + num_rows * num_words, 0);
  return {cu_rows, out_tokens, out_parents, out_depths, ancestors};
}

}  // namespace vllm_echo::cpu
