// SPDX-License-Identifier: Apache-2.0
#include "simd.h"

#include <atomic>
#include <stdexcept>
#include <string>

namespace vllm_echo {
namespace {

SimdLevel best_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  // Every CPU with AVX2 has F16C. The AVX-512 levels are those simd_avx512.cpp names.
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return __builtin_cpu_supports("avx512bf16") ? SimdLevel::kAvx512Bf16 : SimdLevel::kAvx512;
  }
  if (avx2) return SimdLevel::kAvx2;
#endif
  return SimdLevel::kPortable;
}

std::atomic<SimdLevel>& current_level() {
  static std::atomic<SimdLevel> level{best_level()};
  return level;
}

}  // namespace

SimdLevel simd_level() { return current_level().load(std::memory_order_relaxed); }

const char* simd_level_name(SimdLevel level) {
  switch (level) {
    case SimdLevel::kAvx512Bf16:
      return "avx512bf16";
    case SimdLevel::kAvx512:
      return "avx512";
    case SimdLevel::kAvx2:
      return "avx2";
    case SimdLevel::kPortable:
      break;
  }
  return "portable";
}

void set_simd_level(const char* name) {
  const std::string wanted = name;
  for (const SimdLevel level :
       {SimdLevel::kPortable, SimdLevel::kAvx2, SimdLevel::kAvx512, SimdLevel::kAvx512Bf16}) {
    if (wanted != simd_level_name(level)) continue;
    if (level > best_level())
      throw std::invalid_argument("simd level '" + wanted + "' is not supported by this CPU");
    current_level().store(level, std::memory_order_relaxed);
    return;
  }
  throw std::invalid_argument("simd level must be portable, avx2, avx512 or avx512bf16, got '" +
                              wanted + "'");
}

const Kernels& kernels() {
#if defined(__x86_64__)
  switch (simd_level()) {
    case SimdLevel::kAvx512Bf16:
      return avx512bf16::kKernels;
    case SimdLevel::kAvx512:
      return avx512::kKernels;
    case SimdLevel::kAvx2:
      return avx2::kKernels;
    case SimdLevel::kPortable:
      break;
  }
#endif
  return portable::kKernels;
}

}  // namespace vllm_echo
