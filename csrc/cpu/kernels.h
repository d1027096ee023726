// SPDX-License-Identifier: Apache-2.0
// All kernels of one instruction set. Included only by simd_<level>.cpp, like vec.h.
#pragma once

#include "argmax_row.h"
#include "score_row.h"
#include "tree_attention_tile.h"

namespace vllm_echo::ECHO_SIMD_LEVEL {

const Kernels kKernels{tree_attention_tile, argmax_row, score_row};

}  // namespace vllm_echo::ECHO_SIMD_LEVEL
