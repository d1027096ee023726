// SPDX-License-Identifier: Apache-2.0
// The instruction set chosen at run time.
#pragma once

#include "../include/tree_attention.h"

namespace vllm_echo {

enum class SimdLevel : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

enum class FloatType : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// One tile of tree attention. `scratch` is 64-byte aligned and holds `tile_scratch_floats` floats.
using TileKernel = void (*)(const TreeAttentionParams&, const AttentionTile&, FloatType,
                            float* scratch);

// How a row's logits become the numbers whose largest wins: logit / temperature and noise, see
// ../include/keyed_noise.h. Temperature 0: the logits themselves.
struct Draw {
  float temperature = 0.0f;
  uint32_t hash = 0;  // hash_draw of the seed and the position
};

// Index of the largest of `size` values. Of equals the first; a NaN counts as largest, as in
// torch.argmax, and is told by -1 - its index. 0 if there are none.
using ArgmaxKernel = int64_t (*)(const void* row, int64_t size, FloatType, const Draw&);

// log sigmoid(intercept + slope * logit(q)) of `size` log q, each with its own curve.
using ScoreKernel = void (*)(const float* log_probs, const float* intercepts, const float* slopes,
                             int64_t size, float* scores);

// Slots that one step of the online softmax covers. A multiple of 64.
constexpr int64_t kSlotsPerStep = 128;

// Floats of scratch a tile of `num_queries` query vectors needs: queries, outputs, scores, the
// softmax's maximum, decay and (up to 16) sums, and the pointers to one step's value rows.
constexpr int64_t tile_scratch_floats(int64_t num_queries, int64_t head_dim) {
  return num_queries * (2 * head_dim + kSlotsPerStep + 18) + 2 * kSlotsPerStep;
}

// The level in use: the best that this CPU and this build offer, unless set_simd_level was called.
SimdLevel simd_level();
const char* simd_level_name(SimdLevel level);

// Chooses a level by name ("portable", "avx2", "avx512", "avx512bf16"), for tests and benchmarks.
// Throws if it cannot run here.
void set_simd_level(const char* name);

// The kernels of a level.
struct Kernels {
  TileKernel attention_tile;
  ArgmaxKernel argmax_row;
  ScoreKernel score_row;
};

// Those of the level in use.
const Kernels& kernels();

namespace portable {
extern const Kernels kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx512bf16 {
extern const Kernels kKernels;
}
#endif

}  // namespace vllm_echo
