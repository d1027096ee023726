// SPDX-License-Identifier: Apache-2.0
// Checks and allocations of the CUDA operators. With ECHO_CUDA_ON_CPU, for tests, the same code
// takes CPU tensors.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <initializer_list>
#include <optional>
#include <string>

#include "../common/checks.h"
#include "../common/tensors.h"
#include "launch.h"

namespace vllm_echo::cuda {
namespace {

// A tensor and the name it has in the schema.
struct Named {
  const char* name;
  const Tensor& tensor;
};

#if defined(ECHO_CUDA_ON_CPU)
constexpr On kHere = On::kCpu;

class OnDeviceOf {
 public:
  OnDeviceOf(const char*, const Tensor&, std::initializer_list<Named>) {}
  cudaStream_t stream() const { return nullptr; }
};
#else
constexpr On kHere = On::kCuda;

// Allocations and launches go to a tensor's device and its current stream; all others have to be on
// that device, too.
class OnDeviceOf {
 public:
  OnDeviceOf(const char* op, const Tensor& tensor, std::initializer_list<Named> others)
      : index_(tensor.get_device_index()), guard_(tensor.get_device_index()) {
    for (const Named& other : others) {
      require(other.tensor.get_device_index() == index_, op, ": ", other.name,
              " must be on CUDA device ", index_, " like the others, got ",
              other.tensor.get_device_index());
    }
  }

  cudaStream_t stream() const {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream));
    return static_cast<cudaStream_t>(stream);
  }

 private:
  torch::stable::accelerator::DeviceIndex index_;
  torch::stable::accelerator::DeviceGuard guard_;
};
#endif

void require_launch(cudaError_t status, const char* op) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(op) + ": " + cudaGetErrorString(status));
}

void require_vector(const Tensor& tensor, const std::string& what, ScalarType dtype,
                    const char* dtype_name, int64_t size) {
  require_tensor<kHere>(tensor, what.c_str(), dtype, dtype_name, 1);
  require_size(tensor, what.c_str(), 0, size);
}

void require_int_table(const Tensor& tensor, const std::string& what, int64_t rows,
                       int64_t columns) {
  require_int32<kHere>(tensor, what.c_str(), 2);
  require_size(tensor, what.c_str(), 0, rows);
  require_size(tensor, what.c_str(), 1, columns);
}

int64_t require_given(std::optional<int64_t> value, const char* what) {
  require(value.has_value(), what,
          " must be given on a CUDA device: it decides the size of the result, and nothing waits "
          "for what the device knows");
  require(*value >= 0, what, " must not be negative, got ", *value);
  return *value;
}

Element element_of(const Tensor& tensor, const char* what) {
  const ScalarType type = tensor.scalar_type();
  if (type == ScalarType::Float) return Element::kFloat32;
  if (type == ScalarType::BFloat16) return Element::kBfloat16;
  require(type == ScalarType::Half, what, " must have dtype float32, bfloat16 or float16");
  return Element::kFloat16;
}

IntTable table_of(const Tensor& tensor) { return {const_data<int32_t>(tensor), tensor.stride(0)}; }

Tensor new_ints(const Tensor& like, std::initializer_list<int64_t> shape) {
  return new_tensor(like, shape, ScalarType::Int);
}

}  // namespace
}  // namespace vllm_echo::cuda
