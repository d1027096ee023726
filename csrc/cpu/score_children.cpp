// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "../common/checks.h"
#include "../common/tensors.h"
#include "ops.h"
#include "simd.h"

namespace vllm_echo::cpu {
namespace {

// Scores go to the kernel in pieces, with the curve of each written out beside them.
constexpr int64_t kPiece = 512;

}  // namespace

Tensor score_children(const Tensor& log_probs, const Tensor& requests, const Tensor& sampled,
                      const Tensor& curves) {
  require_float32(log_probs, "score_children: log_probs", 3);
  require_int64(requests, "score_children: requests", 1);
  require_bool(sampled, "score_children: sampled", 1);
  require_float32(curves, "score_children: curves", 2);
  require(log_probs.is_contiguous(), "score_children: log_probs must be contiguous");
  require_size(requests, "score_children: requests", 0, log_probs.size(0));
  require_size(curves, "score_children: curves", 0, 2);
  require_size(curves, "score_children: curves", 1, 2);
  require_ascending_rows(requests, "score_children: requests", sampled.size(0));

  Tensor scores = torch::stable::empty_like(log_probs);
  const int64_t of_one = log_probs.size(1) * log_probs.size(2);
  const int64_t total = log_probs.numel();
  const int64_t* request = const_data<int64_t>(requests);
  const bool* samples = const_data<bool>(sampled);
  const Rows<float> curve_of(curves);
  const float* from = const_data<float>(log_probs);
  float* to = data<float>(scores);
  const ScoreKernel kernel = kernels().score_row;
  float intercepts[kPiece];
  float slopes[kPiece];
  int64_t row = 0;
  int64_t row_end = of_one;
  for (int64_t first = 0; first < total; first += kPiece) {
    const int64_t size = std::min(kPiece, total - first);
    for (int64_t i = 0; i < size;) {
      if (first + i == row_end) {
        ++row;
        row_end += of_one;
      }
      const float* curve = curve_of[samples[request[row]] ? 1 : 0];
      for (const int64_t end = std::min(size, row_end - first); i < end; ++i) {
        intercepts[i] = curve[0];
        slopes[i] = curve[1];
      }
    }
    kernel(from + first, intercepts, slopes, size, to + first);
  }
  return scores;
}

}  // namespace vllm_echo::cpu
