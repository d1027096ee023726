// SPDX-License-Identifier: Apache-2.0
#include "../include/best_paying.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "../common/checks.h"
#include "../common/tensors.h"
#include "../include/probability.h"
#include "ops.h"

namespace vllm_echo::cpu {
namespace {

// Keys of all nodes that may be taken, the best first. What is worth nothing is no node.
std::vector<uint64_t> rank_worths(const Tensor& scores, const int32_t* caps) {
  const int64_t num_candidates = scores.size(1);
  std::vector<uint64_t> keys;
  const Rows<float> rows(scores);
  for (int64_t r = 0, num_requests = scores.size(0); r < num_requests; ++r) {
    const float* row = rows[r];
    const int64_t end = std::min<int64_t>(caps[r], num_candidates);
    for (int64_t rank = 0; rank < end; ++rank) {
      const float worth = probability(row[rank]);
      if (worth > 0) keys.push_back(rank_key(worth, r * num_candidates + rank));
    }
  }
  std::sort(keys.begin(), keys.end());
  return keys;
}

}  // namespace

Tensor best_paying(const Tensor& scores, const Tensor& caps, const Tensor& added_ms,
                   int64_t num_requests, double plain_ms) {
  require_float32(scores, "best_paying: scores", 2);
  require_int32(caps, "best_paying: caps", 1);
  require_tensor(added_ms, "best_paying: added_ms", ScalarType::Double, "float64", 1);
  const int64_t rows = scores.size(0);
  const int64_t num_candidates = scores.size(1);
  require_size(caps, "best_paying: caps", 0, rows);
  require(scores.numel() <= kMaxRanked, "best_paying: scores must have fewer entries, got ",
          scores.numel());
  require(added_ms.size(0) >= 1, "best_paying: added_ms must begin with 0 nodes, got no entry");
  const int64_t budget = added_ms.size(0) - 1;
  require(num_requests >= 0, "best_paying: num_requests must not be negative, got ", num_requests);
  require(budget == 0 || plain_ms > 0, "best_paying: plain_ms must be positive, got ", plain_ms);

  Tensor num_nodes = torch::stable::new_zeros(caps, std::vector<int64_t>{rows}, ScalarType::Int);
  if (budget == 0) return num_nodes;
  const std::vector<uint64_t> keys = rank_worths(scores, const_data<int32_t>(caps));
  const int64_t most = std::min(budget, static_cast<int64_t>(keys.size()));
  const StepSizes step{keys.data(), const_data<double>(added_ms), most, num_requests, plain_ms};
  const int64_t size = fastest_size(step);
  int32_t* counts = static_cast<int32_t*>(num_nodes.data_ptr());
  for (int64_t i = 0; i < size; ++i) ++counts[key_index(keys[i]) / num_candidates];
  return num_nodes;
}

}  // namespace vllm_echo::cpu
