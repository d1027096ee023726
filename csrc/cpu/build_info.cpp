// SPDX-License-Identifier: Apache-2.0
#include <torch/headeronly/version.h>

#include "ops.h"
#include "simd.h"

namespace vllm_echo::cpu {

std::string build_info() {
  return std::string("simd=") + simd_level_name(simd_level()) + ";torch=" + TORCH_VERSION +
         ";compiler=" + __VERSION__;
}

void set_simd_level(std::string name) { vllm_echo::set_simd_level(name.c_str()); }

}  // namespace vllm_echo::cpu
