// SPDX-License-Identifier: Apache-2.0
// A vector of ECHO_LANES floats, and the loads, stores and functions the attention kernel needs.
//
// Included only by tree_attention_<level>.cpp, which first sets the instruction set, ECHO_LANES and
// the namespace. Built on the compilers' vector extension; intrinsics only where a conversion has
// an instruction of its own.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own AVX-512 header trips over it
#endif

#define ECHO_INLINE inline __attribute__((always_inline))

namespace vllm_echo::ECHO_SIMD_LEVEL {

constexpr int kLanes = ECHO_LANES;

typedef float Vec __attribute__((vector_size(ECHO_LANES * 4)));
typedef int32_t VecInt __attribute__((vector_size(ECHO_LANES * 4)));
typedef uint32_t VecBits __attribute__((vector_size(ECHO_LANES * 4)));
typedef uint16_t VecHalf __attribute__((vector_size(ECHO_LANES * 2)));

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

ECHO_INLINE Vec broadcast(float x) { return Vec{} + x; }

template <typename To, typename From>
ECHO_INLINE To load_as(const From* from) {
  To to;
  std::memcpy(&to, from, sizeof(To));  // an unaligned vector load
  return to;
}

ECHO_INLINE Vec load(const float* x) { return load_as<Vec>(x); }

ECHO_INLINE void store(float* to, Vec x) { std::memcpy(to, &x, sizeof(Vec)); }

ECHO_INLINE VecBits widen(const uint16_t* x) {
#if defined(ECHO_AVX512)
  return (VecBits)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
#elif defined(ECHO_AVX2)
  return (VecBits)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
#else
  return __builtin_convertvector(load_as<VecHalf>(x), VecBits);
#endif
}

// bf16 is the upper half of a float.
ECHO_INLINE Vec load(const Bf16* x) { return (Vec)(widen(&x->bits) << 16); }

ECHO_INLINE Vec load(const Fp16* x) {
#if defined(ECHO_AVX512)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
#elif defined(ECHO_AVX2)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
#else
  const VecBits half = widen(&x->bits);
  // Exponent and fraction read as a float are 2^112 times too small; the product is exact, for
  // subnormals too.
  Vec magnitude = (Vec)((half & 0x7fffu) << 13) * 0x1p112f;
  const VecBits infinite = (half & 0x7fffu) >= 0x7c00u;  // Inf and NaN keep their own exponent
  const VecBits bits =
      ((VecBits)magnitude & ~infinite) | ((((half & 0x3ffu) << 13) | 0x7f800000u) & infinite);
  return (Vec)(bits | ((half & 0x8000u) << 16));
#endif
}

// Rounds to nearest even. Stores run once per output element, so clarity wins over speed.
ECHO_INLINE void store_lane(float* to, float x) { *to = x; }

ECHO_INLINE void store_lane(Bf16* to, float x) {
  const uint32_t bits = load_as<uint32_t>(&x);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  to->bits = static_cast<uint16_t>(is_nan ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

ECHO_INLINE void store_lane(Fp16* to, float x) {
#if defined(ECHO_AVX512) || defined(ECHO_AVX2)
  to->bits = static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  const uint32_t bits = load_as<uint32_t>(&x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;  // NaN
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;  // 65520 and above round to infinity
  } else if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 leaves multiples of 2^-24, rounded by the hardware, in the low bits.
    const float shifted = load_as<float>(&magnitude) + 0.5f;
    half = load_as<uint32_t>(&shifted) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  to->bits = static_cast<uint16_t>(sign | half);
#endif
}

ECHO_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }

// Halves are combined until one lane is left: a short dependency chain.
#if defined(ECHO_AVX512)
ECHO_INLINE float reduce_max(Vec x) { return _mm512_reduce_max_ps((__m512)x); }
ECHO_INLINE float reduce_sum(Vec x) { return _mm512_reduce_add_ps((__m512)x); }
#else
template <typename Combine>
ECHO_INLINE float reduce(Vec x, Combine combine) {
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = combine(lanes[i], lanes[i + width]);
  }
  return lanes[0];
}
ECHO_INLINE float reduce_max(Vec x) {
  return reduce(x, [](float a, float b) { return a > b ? a : b; });
}
ECHO_INLINE float reduce_sum(Vec x) {
  return reduce(x, [](float a, float b) { return a + b; });
}
#endif

// e^x = power * (1 + rest) for x <= 0: power a power of two, rest near 0.
struct ExpParts {
  Vec power;
  Vec rest;
};

// Meaningless below -87, where the result would be subnormal. NaN gives a rest of NaN.
ECHO_INLINE ExpParts exp_parts(Vec x) {
  const VecInt n =
      __builtin_convertvector(x * 1.44269504f - 0.5f, VecInt);  // truncation: nearest, as x <= 0
  const Vec whole = __builtin_convertvector(n, Vec);
  Vec r =
      x -
      whole *
          0.693359375f;  // ln 2 in two parts: the first has few bits, so that the product is exact
  r = r - whole * -2.12194440e-4f;
  Vec y = broadcast(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  return {(Vec)((n + 127) << 23), y * (r * r) + r};
}

// e^x for x <= 0, within 2 ulp; 0 below -87. NaN stays NaN.
ECHO_INLINE Vec exp_nonpositive(Vec x) {
  const ExpParts e = exp_parts(x);
  return x < -87.0f ? Vec{} : (e.rest + 1.0f) * e.power;
}

// e^x - 1 for x <= 0, near 0 too. NaN stays NaN.
ECHO_INLINE Vec expm1_nonpositive(Vec x) {
  const ExpParts e = exp_parts(x);
  return x < -87.0f ? broadcast(-1.0f) : e.power * e.rest + (e.power - 1.0f);
}

// ln x for normal x > 0, within 2 ulp. NaN stays NaN.
ECHO_INLINE Vec log_positive(Vec x) {
  // x = 2^n * m with m from sqrt(1/2) to sqrt(2), so that the logarithm of m is near 0.
  const VecBits bits = (VecBits)x - 0x3f3504f3u;
  const VecInt n = (VecInt)bits >> 23;
  const Vec m = (Vec)((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  const Vec whole = __builtin_convertvector(n, Vec);
  Vec y = broadcast(7.0376836292e-2f);
  y = y * m - 1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m - 1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m - 1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m - 2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  const Vec square = m * m;
  const Vec low = y * m * square + whole * -2.12194440e-4f - 0.5f * square;
  const Vec result = m + low + whole * 0.693359375f;
  return x == x ? result : x;
}

// ln(1 + e^x) for x <= 0, near 0 too. NaN stays NaN.
ECHO_INLINE Vec log1p_of_exp(Vec x) {
  const Vec e = exp_nonpositive(x);
  const Vec sum = 1.0f + e;
  return log_positive(sum) + (e - (sum - 1.0f)) / sum;  // what the sum lost by rounding
}

ECHO_INLINE Vec tanh(Vec x) {
  const Vec size = x < 0.0f ? -x : x;
  const Vec e = exp_nonpositive(size * -2.0f);
  Vec large = (1.0f - e) / (1.0f + e);
  large = x < 0.0f ? -large : large;
  const Vec s =
      x * x;  // near 0 the quotient cancels: use the series, its error below 0.25 is under 1e-8
  const Vec small =
      x * (1.0f + s * (-1.0f / 3 + s * (2.0f / 15 + s * (-17.0f / 315 + s * (62.0f / 2835)))));
  return size < 0.25f ? small : large;
}

}  // namespace vllm_echo::ECHO_SIMD_LEVEL
