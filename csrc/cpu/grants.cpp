// SPDX-License-Identifier: Apache-2.0
#include "../include/grants.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "../include/rank_key.h"
#include "checks.h"
#include "ops.h"
#include "tensors.h"

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
  const float* scores = const_data<float>(best);
  const bool* takes = const_data<bool>(active);
  const int32_t* cap = const_data<int32_t>(caps);
  int32_t* layers = data<int32_t>(num_layers);
  bool* cut_off = data<bool>(truncated);
  int64_t passed = 0;
  int64_t cut = 0;
  std::vector<uint64_t> wanting;
  for (int64_t r = 0; r < num_requests; ++r) {
    if (!takes_part(takes[r], scores[r])) continue;
    const float confidence = probability(scores[r]);
    if (threshold && !(confidence > static_cast<float>(*threshold))) {
      cut_off[r] = true;
      ++cut;
      continue;
    }
    ++passed;
    if (layers[r] < cap[r]) wanting.push_back(rank_key(confidence, r));
  }
  keep_best(wanting, budget);
  const int32_t* last = const_data<int32_t>(deepest);
  bool* goes_on = data<bool>(deeper);
  for (const uint64_t key : wanting) {
    const int64_t r = key_index(key);
    ++layers[r];
    goes_on[r] = depth + 1 < last[r];
  }
  Tensor counts = new_tensor(best, {3}, ScalarType::Long);
  const int64_t values[] = {passed, cut, static_cast<int64_t>(wanting.size())};
  std::copy_n(values, 3, data<int64_t>(counts));
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

Tensor grant_width(const Tensor& scores, const Tensor& truncated, const Tensor& granted,
                   const Tensor& caps, int64_t budget) {
  require_float32(scores, "grant_width: scores", 2);
  require_bool(truncated, "grant_width: truncated", 1);
  require_int32(granted, "grant_width: granted", 1);
  require_int32(caps, "grant_width: caps", 1);
  const int64_t num_requests = scores.size(0);
  const int64_t num_candidates = scores.size(1);
  require_size(truncated, "grant_width: truncated", 0, num_requests);
  require_size(granted, "grant_width: granted", 0, num_requests);
  require_size(caps, "grant_width: caps", 0, num_requests);
  require(scores.numel() <= kMaxRanked, "grant_width: scores must have fewer entries, got ",
          scores.numel());

  Tensor counts = new_tensor(granted, {num_requests}, ScalarType::Int);
  int32_t* count = data<int32_t>(counts);
  const int32_t* had = const_data<int32_t>(granted);
  const int32_t* cap = const_data<int32_t>(caps);
  const bool* cut_off = const_data<bool>(truncated);
  const Rows<float> rows(scores);
  std::copy_n(had, num_requests, count);
  std::vector<uint64_t> open;
  for (const bool of_class : {true, false}) {
    if (budget <= 0) break;
    open.clear();
    for (int64_t r = 0; r < num_requests; ++r) {
      if (cut_off[r] != of_class) continue;
      const int64_t end = std::min<int64_t>(cap[r], num_candidates);
      for (int64_t rank = std::max<int64_t>(had[r], 0); rank < end; ++rank) {
        const float score = rows[r][rank];
        if (std::isfinite(score)) open.push_back(rank_key(score, r * num_candidates + rank));
      }
    }
    keep_best(open, budget);
    for (const uint64_t key : open) ++count[key_index(key) / num_candidates];
    budget -= static_cast<int64_t>(open.size());
  }
  return counts;
}

}  // namespace vllm_echo::cpu
