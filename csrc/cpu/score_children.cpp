// SPDX-License-Identifier: Apache-2.0
#include "../include/score_children.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "checks.h"
#include "ops.h"
#include "simd.h"

namespace vllm_echo::cpu {
namespace {

// A full block at a time, also at the end: a value's result does not depend on where it stands.
constexpr int64_t kBlock = 16;

struct ScoreBlock {
  float log_probs[kBlock];
  float intercepts[kBlock];
  float slopes[kBlock];
  float scores[kBlock];
};

ECHO_HD void score_block(ScoreBlock& block) {
  for (int64_t i = 0; i < kBlock; ++i) {
    block.scores[i] = static_cast<float>(
        calibrated_score(block.log_probs[i], block.intercepts[i], block.slopes[i]));
  }
}

void score_portable(ScoreBlock& block) { score_block(block); }
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void score_avx2(ScoreBlock& block) { score_block(block); }
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))) void score_avx512(ScoreBlock& block) {
  score_block(block);
}
#endif

using ScoreKernel = void (*)(ScoreBlock&);

ScoreKernel score_kernel() {
#if defined(__x86_64__)
  if (simd_level() == SimdLevel::kAvx512) return score_avx512;
  if (simd_level() == SimdLevel::kAvx2) return score_avx2;
#endif
  return score_portable;
}

}  // namespace

Tensor score_children(const Tensor& log_probs, const Tensor& sampled, const Tensor& curves,
                      int64_t depth) {
  constexpr const char* kLogProbs = "score_children: log_probs";
  require(log_probs.is_cpu(), kLogProbs, " must be on the CPU");
  require(log_probs.scalar_type() == ScalarType::Float, kLogProbs, " must have dtype float32");
  require(log_probs.dim() >= 1, kLogProbs, " must have a dimension of requests, got a scalar");
  require_tensor(sampled, "score_children: sampled", ScalarType::Bool, "bool", 1);
  require_size(sampled, "score_children: sampled", 0, log_probs.size(0));
  require_tensor(curves, "score_children: curves", ScalarType::Float, "float32", 3);
  require_size(curves, "score_children: curves", 0, 2);
  require_size(curves, "score_children: curves", 2, 2);
  require(depth >= 1 && depth <= curves.size(1), "score_children: depth must be in 1 to ",
          curves.size(1), ", got ", depth);

  const Tensor given = log_probs.is_contiguous() ? log_probs : torch::stable::contiguous(log_probs);
  const std::vector<int64_t> sizes(given.sizes().begin(), given.sizes().end());
  Tensor scores = torch::stable::new_empty(given, sizes, ScalarType::Float);
  const int64_t count = given.numel();
  if (count == 0) return scores;
  const int64_t of_request = count / given.size(0);
  const float* values = const_data<float>(given);
  const float* curve = const_data<float>(curves) + (depth - 1) * curves.stride(1);
  float* out = static_cast<float*>(scores.data_ptr());
  const ScoreKernel kernel = score_kernel();
  ScoreBlock block{};
  int64_t filled = 0;
  for (int64_t r = 0, next = 0; r < given.size(0); ++r) {
    const float* own = curve + (const_data<bool>(sampled)[r] ? curves.stride(0) : 0);
    for (const int64_t end = next + of_request; next < end;) {
      block.log_probs[filled] = values[next++];
      block.intercepts[filled] = own[0];
      block.slopes[filled++] = own[1];
      if (filled < kBlock && next < count) continue;
      kernel(block);
      std::copy_n(block.scores, filled, out + next - filled);
      filled = 0;
    }
  }
  return scores;
}

}  // namespace vllm_echo::cpu
