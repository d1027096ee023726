// SPDX-License-Identifier: Apache-2.0
#include <torch/headeronly/version.h>

#include "ops.h"
#include "simd.h"

#if !defined(ECHO_CUDA_ARCHITECTURES)
#define ECHO_CUDA_ARCHITECTURES "none"
#endif

namespace vllm_echo::cpu {

std::string build_info() {
  return std::string("simd=") + simd_level_name(simd_level()) + ";torch=" + TORCH_VERSION +
         ";compiler=" + __VERSION__ + ";cuda=" + ECHO_CUDA_ARCHITECTURES;
}

void set_simd_level(std::string name) { vllm_echo::set_simd_level(name.c_str()); }

}  // namespace vllm_echo::cpu
