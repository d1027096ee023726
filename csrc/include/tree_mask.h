// SPDX-License-Identifier: Apache-2.0
// The visibility mask of tree rows: bit j of a row says that it attends to slot `context_len + j`
// of its request.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace vllm_echo {

constexpr int64_t kMaskWordBits = 64;

// Word `word` of a mask row with every bit outside [first_bit, end_bit) cleared.
ECHO_HD uint64_t mask_word_in_range(const uint64_t* row, int64_t word, int64_t first_bit,
                                    int64_t end_bit) {
  const int64_t low = first_bit - word * kMaskWordBits;
  const int64_t high = end_bit - word * kMaskWordBits;
  uint64_t bits = row[word];
  if (low > 0) bits &= low < kMaskWordBits ? ~uint64_t{0} << low : 0;
  if (high < kMaskWordBits) bits &= high > 0 ? ~(~uint64_t{0} << high) : 0;
  return bits;
}

}  // namespace vllm_echo
