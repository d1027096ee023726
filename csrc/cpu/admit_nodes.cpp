// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "../common/checks.h"
#include "../common/tensors.h"
#include "../include/fastest_size.h"
#include "../include/node_key.h"
#include "ops.h"

namespace vllm_echo::cpu {
namespace {

// The keys of all nodes; those of a request end at the first that is none.
std::vector<int64_t> keys_of_nodes(const Tensor& keys) {
  const Rows<int64_t> rows(keys);
  const int64_t num_columns = keys.size(1);
  std::vector<int64_t> nodes;
  nodes.reserve(keys.numel());
  for (int64_t r = 0, num_requests = keys.size(0); r < num_requests; ++r) {
    const int64_t* row = rows[r];
    for (int64_t i = 0; i < num_columns && row[i] != kNoNode; ++i) nodes.push_back(row[i]);
  }
  return nodes;
}

}  // namespace

Tensor admit_nodes(const Tensor& keys, int64_t budget) {
  require_int64(keys, "admit_nodes: keys", 2);
  std::vector<int64_t> nodes = keys_of_nodes(keys);
  int64_t last = budget > 0 ? kNoNode - 1 : -1;
  if (budget > 0 && budget < static_cast<int64_t>(nodes.size())) {
    std::nth_element(nodes.begin(), nodes.begin() + (budget - 1), nodes.end());
    last = nodes[budget - 1];
  }
  Tensor counts = new_tensor(keys, {keys.size(0)}, ScalarType::Int);
  const Rows<int64_t> rows(keys);
  int32_t* to_counts = data<int32_t>(counts);
  for (int64_t r = 0, num_columns = keys.size(1); r < counts.size(0); ++r) {
    to_counts[r] = static_cast<int32_t>(count_up_to(rows[r], num_columns, last));
  }
  return counts;
}

Tensor fastest_size(const Tensor& keys, const Tensor& added_ms, int64_t num_requests,
                    double plain_ms) {
  require_int64(keys, "fastest_size: keys", 2);
  require_tensor(added_ms, "fastest_size: added_ms", ScalarType::Double, "float64", 1);
  require(added_ms.size(0) >= 1, "fastest_size: added_ms must begin with 0 nodes, got no entry");
  require(num_requests >= 0, "fastest_size: num_requests must not be negative, got ", num_requests);
  const int64_t budget = added_ms.size(0) - 1;
  require(budget == 0 || plain_ms > 0, "fastest_size: plain_ms must be positive, got ", plain_ms);
  std::vector<int64_t> nodes;
  if (budget > 0) nodes = keys_of_nodes(keys);
  std::sort(nodes.begin(), nodes.end());
  const int64_t most = std::min(budget, static_cast<int64_t>(nodes.size()));
  Tensor size = new_tensor(keys, {}, ScalarType::Long);
  *data<int64_t>(size) = vllm_echo::fastest_size(
      {nodes.data(), const_data<double>(added_ms), most, num_requests, plain_ms});
  return size;
}

}  // namespace vllm_echo::cpu
