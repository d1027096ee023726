// SPDX-License-Identifier: Apache-2.0
// New tensors, and pointers into tensors.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <initializer_list>
#include <vector>

#include "checks.h"

namespace vllm_echo {

inline Tensor new_tensor(const Tensor& like, std::initializer_list<int64_t> shape,
                         ScalarType dtype) {
  const std::vector<int64_t> sizes(shape);
  return torch::stable::new_empty(like, sizes, dtype);
}

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// One row of a table.
template <typename T>
T* row_of(const Tensor& table, int64_t row) {
  return data<T>(table) + row * table.stride(0);
}

}  // namespace vllm_echo
