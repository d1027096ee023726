// SPDX-License-Identifier: Apache-2.0
// The order in which a budget is spent: a key per node, ascending, over all requests of a step.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "rank_key.h"

namespace vllm_echo {

// Of the 63 bits of a key that is not negative, the highest first: the stage (9), a value that
// falls within its stage (32), the place in the table of keys (22). The place makes every key
// unique.
constexpr int kPlaceBits = 22;
constexpr int kStageShift = kPlaceBits + 32;
constexpr int64_t kMaxPlaces = int64_t{1} << kPlaceBits;  // requests times nodes of one
constexpr int64_t kMaxTurns = 255;                        // stages below those of width
constexpr int64_t kWidthOfTruncated = kMaxTurns;
constexpr int64_t kWidthOfOthers = kMaxTurns + 1;
constexpr int64_t kNoNode = INT64_MAX;  // behind every key

// `value` is anything but NaN.
ECHO_HD int64_t node_key(int64_t stage, float value, int64_t place) {
  const uint64_t falling = rank_key(value, 0) >> 32;
  return stage << kStageShift | static_cast<int64_t>(falling << kPlaceBits) | place;
}

ECHO_HD float node_value(int64_t key) {
  return key_value(static_cast<uint64_t>(key) << (32 - kPlaceBits));
}

// Keys of one request ascend; how many are at or before `last`.
ECHO_HD int64_t count_up_to(const int64_t* keys, int64_t num_keys, int64_t last) {
  int64_t count = 0;
  while (count < num_keys && keys[count] <= last) ++count;
  return count;
}

}  // namespace vllm_echo
