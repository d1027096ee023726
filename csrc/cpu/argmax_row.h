// SPDX-License-Identifier: Apache-2.0
// The index of the largest value of a row. Included only by simd_<level>.cpp, like vec.h.
#pragma once

#include "../include/keyed_noise.h"
#include "simd.h"
#include "vec.h"

namespace vllm_echo::ECHO_SIMD_LEVEL {
namespace {

// Vectors in flight: a comparison takes longer than a load.
constexpr int kChains = 4;

template <typename T>
Vec load_one(const T* x) {
  T lanes[kLanes] = {};
  lanes[0] = *x;
  return load(lanes);
}

struct Greedy {
  ECHO_INLINE Vec operator()(Vec logits, VecInt) const { return logits; }
};

struct Log {
  ECHO_INLINE Vec operator()(Vec x) const { return log_positive(x); }
};

struct Noised {
  float temperature;
  VecBits hash;

  ECHO_INLINE Vec operator()(Vec logits, VecInt tokens) const {
    const VecBits bits = hash_token(hash, (VecBits)tokens);
    const Vec high = __builtin_convertvector((VecInt)(bits >> 16), Vec);
    const Vec low = __builtin_convertvector((VecInt)(bits & 0xFFFFu), Vec);
    return logits / temperature + gumbel_of(uniform_of(high, low), Log{});
  }
};

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
    const float x = load_one(row + i)[0];
    if (x != x) return i;
  }
  return 0;
}

template <typename T, typename Score>
int64_t argmax(const T* row, int64_t size, const Score& score) {
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
      const Vec x = score(load(row + i + c * kLanes), index[c]);
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
    const float x = score(load_one(row + i), VecInt{} + static_cast<int32_t>(i))[0];
    any_nan |= x != x;
    largest.offer(x, i);
  }
  return any_nan ? -1 - first_nan(row, size) : largest.index;
}

template <typename T>
int64_t argmax_of(const void* row, int64_t size, const Draw& draw) {
  const T* values = static_cast<const T*>(row);
  if (draw.temperature == 0.0f) return argmax(values, size, Greedy{});
  return argmax(values, size, Noised{draw.temperature, VecBits{} + draw.hash});
}

int64_t argmax_row(const void* row, int64_t size, FloatType type, const Draw& draw) {
  switch (type) {
    case FloatType::kFloat32:
      return argmax_of<float>(row, size, draw);
    case FloatType::kBfloat16:
      return argmax_of<Bf16>(row, size, draw);
    case FloatType::kFloat16:
      return argmax_of<Fp16>(row, size, draw);
  }
  return 0;
}

}  // namespace
}  // namespace vllm_echo::ECHO_SIMD_LEVEL
