// SPDX-License-Identifier: Apache-2.0
// The floating point types that the kernels take.
#pragma once

#include "../common/checks.h"
#include "simd.h"

namespace vllm_echo {

struct FloatName {
  ScalarType dtype;
  FloatType type;
  int64_t size;  // bytes
  const char* name;
};
constexpr FloatName kFloats[] = {{ScalarType::Float, FloatType::kFloat32, 4, "float32"},
                                 {ScalarType::BFloat16, FloatType::kBfloat16, 2, "bfloat16"},
                                 {ScalarType::Half, FloatType::kFloat16, 2, "float16"}};

// `what` is "operator: tensor".
inline FloatName float_of(const Tensor& tensor, const char* what) {
  for (const FloatName& entry : kFloats) {
    if (entry.dtype == tensor.scalar_type()) return entry;
  }
  require(false, what, " must have dtype float32, bfloat16 or float16");
  return kFloats[0];
}

}  // namespace vllm_echo
