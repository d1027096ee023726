// SPDX-License-Identifier: Apache-2.0
// Numbers of 16 and 32 bits, and the arithmetic of Triton's kernels where a result has to be theirs
// bit by bit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace vllm_echo::cuda {

using Bfloat16 = __nv_bfloat16;
using Float16 = __half;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(Bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(Float16 x) { return __half2float(x); }

__device__ inline void from_float(float x, float* to) { *to = x; }
__device__ inline void from_float(float x, Bfloat16* to) { *to = __float2bfloat16(x); }
__device__ inline void from_float(float x, Float16* to) { *to = __float2half(x); }

// 16 bytes of numbers.
template <typename T>
struct Vector {
  uint4 bits;

  __device__ float get(int i) const { return to_float(reinterpret_cast<const T*>(&bits)[i]); }
};

template <typename T>
__device__ Vector<T> load_vector(const T* from) {
  return {__ldg(reinterpret_cast<const uint4*>(from))};
}

// The numbers that a lane holds, loaded and stored in as few pieces as their size allows.
constexpr int lanes_alignment(int num_bytes) {
  const int lowest = num_bytes & -num_bytes;
  return lowest < 16 ? lowest : 16;
}

template <typename T, int kCount>
struct alignas(lanes_alignment(kCount * sizeof(T))) Lanes {
  T values[kCount];

  __device__ float get(int i) const { return to_float(values[i]); }
};

// Triton's float32 division and logarithm: within 2 ulp, and not those of the C library.
__device__ inline float divide(float x, float y) {
#if defined(ECHO_CUDA_ON_CPU)
  return x / y;
#else
  float quotient;
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(x), "f"(y));
  return quotient;
#endif
}

__device__ inline float natural_log(float x) {
#if defined(ECHO_CUDA_ON_CPU)
  return logf(x);
#else
  float log2;
  asm("lg2.approx.f32 %0, %1;" : "=f"(log2) : "f"(x));
  return log2 * 0.693147180559945309417f;
#endif
}

}  // namespace vllm_echo::cuda
