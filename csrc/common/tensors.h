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

// The rows of a table. The stable ABI answers every question about a tensor by a call, so a loop
// asks once, before it begins.
template <typename T>
class Rows {
 public:
  explicit Rows(const Tensor& table) : first_(data<T>(table)), stride_(table.stride(0)) {}

  T* operator[](int64_t row) const { return first_ + row * stride_; }

 private:
  T* first_;
  int64_t stride_;
};

}  // namespace vllm_echo
