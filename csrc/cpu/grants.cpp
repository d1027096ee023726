// SPDX-License-Identifier: Apache-2.0
#include "../include/grants.h"

#include <algorithm>
#include <cmath>
#include <memory>
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

// Phase 2, over ranked `scores`: adds to `counts`, which begin as `granted`.
void add_width(const Tensor& scores, const bool* truncated, const int32_t* granted,
               const int32_t* caps, int64_t budget, int32_t* counts) {
  const int64_t num_requests = scores.size(0);
  const int64_t num_candidates = scores.size(1);
  const Rows<float> rows(scores);
  std::vector<uint64_t> open;
  for (const bool of_class : {true, false}) {
    if (budget <= 0) break;
    open.clear();
    for (int64_t r = 0; r < num_requests; ++r) {
      if (truncated[r] != of_class) continue;
      const int64_t end = std::min<int64_t>(caps[r], num_candidates);
      for (int64_t rank = std::max<int64_t>(granted[r], 0); rank < end; ++rank) {
        const float score = rows[r][rank];
        if (std::isfinite(score)) open.push_back(rank_key(score, r * num_candidates + rank));
      }
    }
    keep_best(open, budget);
    for (const uint64_t key : open) ++counts[key_index(key) / num_candidates];
    budget -= static_cast<int64_t>(open.size());
  }
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

Tensor grant_width(const Tensor& scores, const Tensor& truncated, const Tensor& granted,
                   const Tensor& caps, int64_t budget) {
  require_float32(scores, "grant_width: scores", 2);
  require_bool(truncated, "grant_width: truncated", 1);
  require_int32(granted, "grant_width: granted", 1);
  require_int32(caps, "grant_width: caps", 1);
  const int64_t num_requests = scores.size(0);
  require_size(truncated, "grant_width: truncated", 0, num_requests);
  require_size(granted, "grant_width: granted", 0, num_requests);
  require_size(caps, "grant_width: caps", 0, num_requests);
  require(scores.numel() <= kMaxRanked, "grant_width: scores must have fewer entries, got ",
          scores.numel());

  Tensor counts = new_tensor(granted, {num_requests}, ScalarType::Int);
  const int32_t* had = const_data<int32_t>(granted);
  std::copy_n(had, num_requests, data<int32_t>(counts));
  add_width(scores, const_data<bool>(truncated), had, const_data<int32_t>(caps), budget,
            data<int32_t>(counts));
  return counts;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> schedule_budget(
    const Tensor& tokens, const Tensor& parents, const Tensor& depths, const Tensor& scores,
    const Tensor& caps, const Tensor& deepest, const Tensor& thresholds, int64_t budget, bool width,
    int64_t max_nodes) {
  require_int32(tokens, "schedule_budget: tokens", 2);
  require_int32(parents, "schedule_budget: parents", 2);
  require_int32(depths, "schedule_budget: depths", 2);
  require_float32(scores, "schedule_budget: scores", 2);
  require_int32(caps, "schedule_budget: caps", 1);
  require_int32(deepest, "schedule_budget: deepest", 1);
  require_float32(thresholds, "schedule_budget: thresholds", 1);
  const int64_t num_requests = scores.size(0);
  const int64_t num_candidates = scores.size(1);
  const int64_t num_depths = thresholds.size(0);
  for (const auto& [tensor, what] :
       {std::pair<const Tensor&, const char*>{tokens, "schedule_budget: tokens"},
        std::pair<const Tensor&, const char*>{parents, "schedule_budget: parents"},
        std::pair<const Tensor&, const char*>{depths, "schedule_budget: depths"}}) {
    require_size(tensor, what, 0, num_requests);
    require_size(tensor, what, 1, num_candidates);
  }
  require(max_nodes >= 0, "schedule_budget: max_nodes must not be negative, got ", max_nodes);
  require_size(caps, "schedule_budget: caps", 0, num_requests);
  require_size(deepest, "schedule_budget: deepest", 0, num_requests);

  Tensor num_nodes = new_tensor(scores, {num_requests}, ScalarType::Int);
  Tensor num_layers = new_tensor(scores, {num_requests}, ScalarType::Int);
  Tensor truncated = new_mask(scores, num_requests);
  Tensor gate_counts = new_tensor(scores, {num_depths, 3}, ScalarType::Long);
  Tensor drafted_scores = new_tensor(scores, {num_requests, num_candidates}, ScalarType::Float);
  const Rows<float> from(scores);
  const Rows<float> drafted(drafted_scores);
  const Rows<int32_t> depth_of(depths);
  const Requests requests{num_requests, const_data<int32_t>(caps), const_data<int32_t>(deepest),
                          data<int32_t>(num_layers), data<bool>(truncated)};
  std::fill_n(requests.num_layers, num_requests, 0);

  // Depth by depth; `last_layer` is the last one that each request would have drafted.
  std::vector<int32_t> last_layer(num_requests);
  for (int64_t r = 0; r < num_requests; ++r) last_layer[r] = requests.caps[r] > 0 ? 1 : 0;
  std::vector<float> best(num_requests);
  const auto active = std::make_unique<bool[]>(num_requests);
  const auto deeper = std::make_unique<bool[]>(num_requests);
  const float* gates = const_data<float>(thresholds);
  int64_t* counts = data<int64_t>(gate_counts);
  for (int64_t depth = 0; depth < num_depths; ++depth) {
    for (int64_t r = 0; r < num_requests; ++r) {
      active[r] = last_layer[r] == depth + 1;
      deeper[r] = false;
      best[r] = -INFINITY;
      for (int64_t c = 0; active[r] && c < num_candidates; ++c) {
        if (depth_of[r][c] == depth + 1 && from[r][c] > best[r]) best[r] = from[r][c];
      }
    }
    std::optional<float> gate;
    if (!std::isnan(gates[depth])) gate = gates[depth];
    grant_one_layer(requests, best.data(), active.get(), depth, gate, budget, deeper.get(),
                    counts + 3 * depth);
    budget -= counts[3 * depth + 2];
    for (int64_t r = 0; r < num_requests; ++r) {
      // Nobody is drafted for once nothing is left to spend.
      if (deeper[r] && budget > 0 && depth + 1 < num_depths) ++last_layer[r];
    }
  }
  for (int64_t r = 0; r < num_requests; ++r) {
    for (int64_t c = 0; c < num_candidates; ++c) {
      drafted[r][c] = depth_of[r][c] <= last_layer[r] ? from[r][c] : -INFINITY;
    }
  }
  auto [tokens_out, parents_out, depths_out, scores_out] =
      rank_trees(tokens, parents, depths, drafted_scores, max_nodes);
  int32_t* nodes = data<int32_t>(num_nodes);
  std::copy_n(requests.num_layers, num_requests, nodes);
  if (width) {
    add_width(scores_out, requests.truncated, requests.num_layers, requests.caps, budget, nodes);
  }
  return {tokens_out, parents_out, depths_out, scores_out,
          num_nodes,  num_layers,  truncated,  gate_counts};
}

}  // namespace vllm_echo::cpu
