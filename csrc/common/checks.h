// SPDX-License-Identifier: Apache-2.0
// Checks at the door of an operator. Each error begins with the operator and names the tensor.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>

namespace vllm_echo {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
void require(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());  // a ValueError in Python
}

enum class On { kCpu, kCuda };  // the device that an operator works on

// `what` is "operator: tensor".
template <On kOn = On::kCpu>
void require_tensor(const Tensor& tensor, const char* what, ScalarType dtype,
                    const char* dtype_name, int64_t num_dims) {
  if constexpr (kOn == On::kCpu) {
    require(tensor.is_cpu(), what, " must be on the CPU");
  } else {
    require(tensor.is_cuda(), what, " must be on a CUDA device");
  }
  require(tensor.scalar_type() == dtype, what, " must have dtype ", dtype_name);
  require(tensor.dim() == num_dims, what, " must have ", num_dims, " dimensions, got ",
          tensor.dim());
  require(num_dims == 0 || tensor.size(num_dims - 1) <= 1 || tensor.stride(num_dims - 1) == 1, what,
          " must be contiguous in its last dimension");
}

template <On kOn = On::kCpu>
void require_int32(const Tensor& tensor, const char* what, int64_t num_dims) {
  require_tensor<kOn>(tensor, what, ScalarType::Int, "int32", num_dims);
}

template <On kOn = On::kCpu>
void require_int64(const Tensor& tensor, const char* what, int64_t num_dims) {
  require_tensor<kOn>(tensor, what, ScalarType::Long, "int64", num_dims);
}

template <On kOn = On::kCpu>
void require_float32(const Tensor& tensor, const char* what, int64_t num_dims) {
  require_tensor<kOn>(tensor, what, ScalarType::Float, "float32", num_dims);
}

template <On kOn = On::kCpu>
void require_bool(const Tensor& tensor, const char* what, int64_t num_dims) {
  require_tensor<kOn>(tensor, what, ScalarType::Bool, "bool", num_dims);
}

inline void require_size(const Tensor& tensor, const char* what, int64_t dim, int64_t size) {
  require(tensor.size(dim) == size, what, " must have size ", size, " in dimension ", dim, ", got ",
          tensor.size(dim));
}

template <typename T>
const T* const_data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.data_ptr());
}

// Rows of a table that are named must ascend, and exist.
inline void require_ascending_rows(const Tensor& rows, const char* what, int64_t num_rows) {
  const int64_t* row = const_data<int64_t>(rows);
  for (int64_t i = 0; i < rows.size(0); ++i) {
    require(row[i] >= 0 && row[i] < num_rows, what, " names request ", row[i], " of ", num_rows);
    require(i == 0 || row[i] > row[i - 1], what, " must ascend, got ", i == 0 ? 0 : row[i - 1],
            " before ", row[i]);
  }
}

// Prefix sums of rows must start at 0, never fall, and end at the number of rows.
inline void require_prefix_sums(const Tensor& cu_rows, const char* what, int64_t num_rows) {
  const int64_t count = cu_rows.size(0);
  require(count >= 1, what, " must have one entry more than there are requests, got none");
  const int32_t* rows = const_data<int32_t>(cu_rows);
  require(rows[0] == 0, what, " must start at 0, got ", rows[0]);
  for (int64_t r = 1; r < count; ++r) {
    require(rows[r] >= rows[r - 1], what, " must not fall, got ", rows[r - 1], " before ", rows[r]);
  }
  require(rows[count - 1] == num_rows, what, " must end at the number of rows (", num_rows,
          "), got ", rows[count - 1]);
}

// The physical blocks behind logical slots [first, end) must exist.
inline void require_blocks(const int32_t* blocks, int64_t max_blocks, int64_t num_blocks,
                           int64_t block_size, int64_t first, int64_t end, const char* what,
                           int64_t request) {
  if (first >= end) return;
  require(end <= max_blocks * block_size, what, " has room for ", max_blocks * block_size,
          " slots, but request ", request, " uses slot ", end - 1);
  for (int64_t block = first / block_size; block <= (end - 1) / block_size; ++block) {
    require(blocks[block] >= 0 && blocks[block] < num_blocks, what, " names block ", blocks[block],
            " of ", num_blocks, " for request ", request);
  }
}

}  // namespace vllm_echo
