// SPDX-License-Identifier: Apache-2.0
#include "../include/grants.h"

#include <algorithm>
#include <vector>

#include "../common/checks.h"
#include "../common/tensors.h"
#include "../include/rank_key.h"
#include "ops.h"

namespace vllm_echo::cpu {
namespace {

Tensor new_mask(const Tensor& like, int64_t size) {
  Tensor mask = new_tensor(like, {size}, ScalarType::Bool);
  std::fill_n(data<bool>(mask), size, false);
  return mask;
}

// The `budget` lowest keys come first, in any order.
void keep_best(std::vector<uint64_t>& keys, int64_t budget) {
  const int64_t kept = std::max<int64_t>(budget, 0);
  if (kept >= static_cast<int64_t>(keys.size())) return;
  std::nth_element(keys.begin(), keys.begin() + kept, keys.end());
  keys.resize(kept);
}

// What phase 1 reads and writes of the requests.
struct Requests {
  int64_t size;
  const int32_t* caps;
  const int32_t* deepest;
  int32_t* num_layers;
  bool* truncated;
};

// `counts`: passed, cut, granted.
void grant_one_layer(const Requests& requests, const float* best, const bool* active, int64_t depth,
                     std::optional<float> threshold, int64_t budget, bool* deeper,
                     int64_t* counts) {
  int64_t passed = 0;
  int64_t cut = 0;
  std::vector<uint64_t> wanting;
  for (int64_t r = 0; r < requests.size; ++r) {
    if (!takes_part(active[r], best[r])) continue;
    const float confidence = probability(best[r]);
    if (threshold && !(confidence > *threshold)) {
      requests.truncated[r] = true;
      ++cut;
      continue;
    }
    ++passed;
    if (requests.num_layers[r] < requests.caps[r]) wanting.push_back(rank_key(confidence, r));
  }
  keep_best(wanting, budget);
  for (const uint64_t key : wanting) {
    const int64_t r = key_index(key);
    ++requests.num_layers[r];
    deeper[r] = depth + 1 < requests.deepest[r];
  }
  counts[0] = passed;
  counts[1] = cut;
  counts[2] = static_cast<int64_t>(wanting.size());
}

}  // namespace

std::tuple<Tensor, Tensor> grant_layer(const Tensor& best, const Tensor& active, const Tensor& caps,
                                       const Tensor& deepest, Tensor num_layers, Tensor truncated,
                                       int64_t depth, std::optional<double> threshold,
                                       int64_t budget) {
  require_float32(best, "grant_layer: best", 1);
  require_bool(active, "grant_layer: active", 1);
  require_int32(caps, "grant_layer: caps", 1);
  require_int32(deepest, "grant_layer: deepest", 1);
  require_int32(num_layers, "grant_layer: num_layers", 1);
  require_bool(truncated, "grant_layer: truncated", 1);
  const int64_t num_requests = best.size(0);
  require_size(active, "grant_layer: active", 0, num_requests);
  require_size(caps, "grant_layer: caps", 0, num_requests);
  require_size(deepest, "grant_layer: deepest", 0, num_requests);
  require_size(num_layers, "grant_layer: num_layers", 0, num_requests);
  require_size(truncated, "grant_layer: truncated", 0, num_requests);

  Tensor deeper = new_mask(active, num_requests);
  Tensor counts = new_tensor(best, {3}, ScalarType::Long);
  const Requests requests{num_requests, const_data<int32_t>(caps), const_data<int32_t>(deepest),
                          data<int32_t>(num_layers), data<bool>(truncated)};
  std::optional<float> gate;
  if (threshold) gate = static_cast<float>(*threshold);
  grant_one_layer(requests, const_data<float>(best), const_data<bool>(active), depth, gate, budget,
                  data<bool>(deeper), data<int64_t>(counts));
  return {deeper, counts};
}

Tensor expect_gain(const Tensor& best, const Tensor& active, const Tensor& deepest,
                   const Tensor& sampled, const Tensor& best_child, int64_t depth, double price,
                   double ms_per_token, double request_ms, double layer_ms) {
  require_float32(best, "expect_gain: best", 1);
  require_bool(active, "expect_gain: active", 1);
  require_int32(deepest, "expect_gain: deepest", 1);
  require_bool(sampled, "expect_gain: sampled", 1);
  require_tensor(best_child, "expect_gain: best_child", ScalarType::Double, "float64", 1);
  const int64_t num_requests = best.size(0);
  require_size(active, "expect_gain: active", 0, num_requests);
  require_size(deepest, "expect_gain: deepest", 0, num_requests);
  require_size(sampled, "expect_gain: sampled", 0, num_requests);
  require_size(best_child, "expect_gain: best_child", 0, 2);

  Tensor deeper = new_mask(active, num_requests);
  bool* goes_on = data<bool>(deeper);
  const float* scores = const_data<float>(best);
  const bool* takes = const_data<bool>(active);
  const bool* samples = const_data<bool>(sampled);
  const int32_t* last = const_data<int32_t>(deepest);
  const double* child = const_data<double>(best_child);
  double total = 0.0;
  for (int64_t r = 0; r < num_requests; ++r) {
    if (!takes_part(takes[r], scores[r]) || depth + 1 >= last[r]) continue;
    const ExpectedGain gain{child[samples[r] ? 1 : 0], price, ms_per_token, request_ms};
    const double value = gain.of(scores[r]);
    if (!(value > 0)) continue;
    goes_on[r] = true;
    total += value;
  }
  if (!(total > layer_ms)) std::fill_n(goes_on, num_requests, false);
  return deeper;
}

}  // namespace vllm_echo::cpu
