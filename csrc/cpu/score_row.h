// SPDX-License-Identifier: Apache-2.0
// Draft log-probabilities to log acceptance probabilities. Included only by simd_<level>.cpp, like
// vec.h.
#pragma once

#include <cstring>

#include "simd.h"
#include "vec.h"

namespace vllm_echo::ECHO_SIMD_LEVEL {
namespace {

// log sigmoid(intercept + slope * logit(q)) of x = log q.
ECHO_INLINE Vec acceptance_score(Vec x, Vec intercept, Vec slope) {
  const float sure = -1e-6f;  // q = 1 has no finite logit
  x = x > sure ? broadcast(sure) : x;
  const Vec logit = x - log_positive(-expm1_nonpositive(x));
  const Vec y = intercept + slope * logit;
  const Vec size = y < 0.0f ? -y : y;
  return (y < 0.0f ? y : Vec{}) - log1p_of_exp(-size);
}

void score_row(const float* log_probs, const float* intercepts, const float* slopes, int64_t size,
               float* scores) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    store(scores + i,
          acceptance_score(load(log_probs + i), load(intercepts + i), load(slopes + i)));
  }
  if (i == size) return;
  // The rest goes through the same vectors, so that a score does not depend on its place.
  const size_t rest = (size - i) * sizeof(float);
  float lanes[3][kLanes] = {};
  std::memcpy(lanes[0], log_probs + i, rest);
  std::memcpy(lanes[1], intercepts + i, rest);
  std::memcpy(lanes[2], slopes + i, rest);
  float last[kLanes];
  store(last, acceptance_score(load(lanes[0]), load(lanes[1]), load(lanes[2])));
  std::memcpy(scores + i, last, rest);
}

}  // namespace
}  // namespace vllm_echo::ECHO_SIMD_LEVEL
