// SPDX-License-Identifier: Apache-2.0
// What the kernels share. They use nothing of PyTorch.
#pragma once

#include <cstdint>

#include "launch.h"

namespace vllm_echo::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__device__ inline int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ inline int warp() { return static_cast<int>(threadIdx.x) / kWarp; }

__device__ inline float sum_over_warp(float value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

__device__ inline int64_t sum_over_warp(int64_t value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, static_cast<long long>(value), offset);
  }
  return value;
}

// Sum over a block of whole warps, in every thread. `scratch` holds a number a warp; the block may
// use it again after the call.
__device__ inline int64_t sum_over_block(int64_t value, int64_t* scratch) {
  value = sum_over_warp(value);
  if (lane() == 0) scratch[warp()] = value;
  __syncthreads();
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
  int64_t total = 0;
  for (int i = 0; i < num_warps; ++i) total += scratch[i];
  __syncthreads();
  return total;
}

}  // namespace vllm_echo::cuda
