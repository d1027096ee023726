// SPDX-License-Identifier: Apache-2.0
// The index of the largest value of a row. Included only by simd_<level>.cpp, like vec.h.
#pragma once

#include "simd.h"
#include "vec.h"

namespace vllm_echo::ECHO_SIMD_LEVEL {
namespace {

// Vectors in flight: a comparison takes longer than a load.
constexpr int kChains = 4;

template <typename T>
float to_float(const T* x) {
  T lanes[kLanes] = {};
  lanes[0] = *x;
  return load(lanes)[0];
}

// Where the best value of some lanes is; lower indices win among equals.
struct Largest {
  float value;
  int64_t index;

  ECHO_INLINE void offer(float x, int64_t at) {
    if (x > value || (x == value && at < index)) *this = {x, at};
  }
};

template <typename T>
int64_t first_nan(const T* row, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const float x = to_float(row + i);
    if (x != x) return i;
  }
  return 0;
}

template <typename T>
int64_t argmax(const T* row, int64_t size) {
  constexpr int64_t kStride = kChains * kLanes;
  Vec best[kChains];
  VecInt at[kChains];
  VecInt index[kChains];
  VecInt nan{};
  for (int c = 0; c < kChains; ++c) {
    best[c] = broadcast(-std::numeric_limits<float>::infinity());
    for (int lane = 0; lane < kLanes; ++lane) index[c][lane] = c * kLanes + lane;
    at[c] = index[c];
  }
  int64_t i = 0;
  for (; i + kStride <= size; i += kStride) {
    for (int c = 0; c < kChains; ++c) {
      const Vec x = load(row + i + c * kLanes);
      const VecInt better = x > best[c];
      best[c] = better ? x : best[c];
      at[c] = better ? index[c] : at[c];
      nan |= x != x;
      index[c] += static_cast<int32_t>(kStride);
    }
  }
  bool any_nan = false;
  Largest largest{-std::numeric_limits<float>::infinity(), size > 0 ? size - 1 : 0};
  if (i > 0) {
    for (int c = 0; c < kChains; ++c) {
      for (int lane = 0; lane < kLanes; ++lane) largest.offer(best[c][lane], at[c][lane]);
    }
    for (int lane = 0; lane < kLanes; ++lane) any_nan |= nan[lane] != 0;
  }
  for (; i < size; ++i) {
    const float x = to_float(row + i);
    any_nan |= x != x;
    largest.offer(x, i);
  }
  return any_nan ? first_nan(row, size) : largest.index;
}

}  // namespace

int64_t argmax_row(const void* row, int64_t size, FloatType type) {
  switch (type) {
    case FloatType::kFloat32:
      return argmax(static_cast<const float*>(row), size);
    case FloatType::kBfloat16:
      return argmax(static_cast<const Bf16*>(row), size);
    case FloatType::kFloat16:
      return argmax(static_cast<const Fp16*>(row), size);
  }
  return 0;
}

}  // namespace vllm_echo::ECHO_SIMD_LEVEL
