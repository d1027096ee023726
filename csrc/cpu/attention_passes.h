// SPDX-License-Identifier: Apache-2.0
// The two matrix products of attention, as passes over a few query vectors that stay in registers.
//
// Included only through tree_attention_tile.h; compiled once for each instruction set (see vec.h).
#pragma once

#include <type_traits>

#include "simd.h"
#include "vec.h"

namespace vllm_echo::ECHO_SIMD_LEVEL {
namespace {

// Rows and columns of register accumulators: 6 x 4 fit AVX-512's 32 registers, 6 x 2 the
// others' 16.
constexpr int kQueriesPerPass = 6;
constexpr int kVecsPerPass = ECHO_VECS_PER_PASS;

// A query vector as score_pass reads it.
template <typename T>
ECHO_INLINE void store_query(const T* from, int64_t head_dim, float scale, float* query) {
  for (int64_t d = 0; d < head_dim; d += kLanes) store(query + d, load(from + d) * scale);
}

// scores[m, slot] = query[m] . key[slot] for kQueries x (kVecs * kLanes). `keys` is dim-major.
template <typename T, int kQueries, int kVecs>
ECHO_INLINE void score_pass(const float* query, int64_t head_dim, const T* keys,
                            int64_t key_dim_stride, float* scores) {
  Vec sum[kQueries][kVecs] = {};
  for (int64_t d = 0; d < head_dim; ++d) {
    Vec key[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) key[v] = load(keys + d * key_dim_stride + v * kLanes);
#pragma GCC unroll 6
    for (int m = 0; m < kQueries; ++m) {
      const Vec q = broadcast(query[m * head_dim + d]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sum[m][v] += q * key[v];
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < kQueries; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(scores + m * kSlotsPerStep + v * kLanes, sum[m][v]);
  }
}

#if defined(ECHO_BF16_DOT)
// In bfloat16 two dimensions are multiplied and added at once: the query keeps its own bits, and
// the numbers of a slot in two dimensions are brought side by side.
ECHO_INLINE void store_query(const Bf16* from, int64_t head_dim, float, float* query) {
  std::memcpy(query, from, head_dim * sizeof(Bf16));
}

ECHO_INLINE __m512bh pair_slots(const Bf16* even_dim, const Bf16* odd_dim) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m256i even = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even_dim));
  const __m256i odd = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd_dim));
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1);
  return (__m512bh)_mm512_permutexvar_epi16(order, both);
}

template <int kQueries, int kVecs>
ECHO_INLINE void score_bf16_pass(const float* query, int64_t head_dim, const Bf16* keys,
                                 int64_t key_dim_stride, float scale, float* scores) {
  Vec sum[kQueries][kVecs] = {};
  for (int64_t d = 0; d < head_dim; d += 2) {
    __m512bh key[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const Bf16* even = keys + d * key_dim_stride + v * kLanes;
      key[v] = pair_slots(even, even + key_dim_stride);
    }
#pragma GCC unroll 6
    for (int m = 0; m < kQueries; ++m) {
      const int32_t pair = load_as<int32_t>(query + m * head_dim + d / 2);
      const __m512bh q = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        sum[m][v] = (Vec)_mm512_dpbf16_ps((__m512)sum[m][v], q, key[v]);
      }
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < kQueries; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      store(scores + m * kSlotsPerStep + v * kLanes, sum[m][v] * scale);
    }
  }
}
#endif

template <typename T, int kQueries, int kVecs>
ECHO_INLINE void score_any_pass(const float* query, int64_t head_dim, const T* keys,
                                int64_t key_dim_stride, float scale, float* scores) {
#if defined(ECHO_BF16_DOT)
  if constexpr (std::is_same_v<T, Bf16>) {
    return score_bf16_pass<kQueries, kVecs>(query, head_dim, keys, key_dim_stride, scale, scores);
  }
#endif
  (void)scale;  // the queries are scaled already
  score_pass<T, kQueries, kVecs>(query, head_dim, keys, key_dim_stride, scores);
}

// acc[m] = acc[m] * decay[m] + sum over i of probs[m, i] * value_rows[i], for kQueries queries and
// kVecs * kLanes dimensions.
template <typename T, int kQueries, int kVecs>
ECHO_INLINE void value_pass(const float* probs, const T* const* value_rows, int64_t num_slots,
                            int64_t dim, const float* decay, int64_t head_dim, float* acc) {
  Vec sum[kQueries][kVecs];
#pragma GCC unroll 6
  for (int m = 0; m < kQueries; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v)
      sum[m][v] = load(acc + m * head_dim + dim + v * kLanes) * decay[m];
  }
  for (int64_t i = 0; i < num_slots; ++i) {
    Vec value[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) value[v] = load(value_rows[i] + dim + v * kLanes);
#pragma GCC unroll 6
    for (int m = 0; m < kQueries; ++m) {
      const Vec prob = broadcast(probs[m * kSlotsPerStep + i]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sum[m][v] += prob * value[v];
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < kQueries; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(acc + m * head_dim + dim + v * kLanes, sum[m][v]);
  }
}

// The passes are instantiated for 1..kQueriesPerPass queries and 1, 2 or kVecsPerPass vectors;
// these pick one.
template <typename T, int kVecs>
void score_queries(int64_t num_queries, const float* query, int64_t head_dim, const T* keys,
                   int64_t key_dim_stride, float scale, float* scores) {
  switch (num_queries) {
#define ECHO_CASE(n) \
  case n:            \
    return score_any_pass<T, n, kVecs>(query, head_dim, keys, key_dim_stride, scale, scores);
    ECHO_CASE(1) ECHO_CASE(2) ECHO_CASE(3) ECHO_CASE(4) ECHO_CASE(5) ECHO_CASE(6)
#undef ECHO_CASE
  }
}

template <typename T, int kVecs>
void value_queries(int64_t num_queries, const float* probs, const T* const* value_rows,
                   int64_t num_slots, int64_t dim, const float* decay, int64_t head_dim,
                   float* acc) {
  switch (num_queries) {
#define ECHO_CASE(n) \
  case n:            \
    return value_pass<T, n, kVecs>(probs, value_rows, num_slots, dim, decay, head_dim, acc);
    ECHO_CASE(1) ECHO_CASE(2) ECHO_CASE(3) ECHO_CASE(4) ECHO_CASE(5) ECHO_CASE(6)
#undef ECHO_CASE
  }
}

// The widest pass that fits into `vecs` remaining vectors.
ECHO_INLINE int64_t pass_width(int64_t vecs) {
  return vecs >= kVecsPerPass ? kVecsPerPass : vecs >= 2 ? 2 : 1;
}

}  // namespace
}  // namespace vllm_echo::ECHO_SIMD_LEVEL
