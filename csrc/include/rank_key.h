// SPDX-License-Identifier: Apache-2.0
// Order among candidates: a key per candidate, and ascending keys are descending values, ties by
// index. No two keys are equal, so every sort gives the same order.
#pragma once

#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace vllm_echo {

constexpr int64_t kMaxRanked = int64_t{1} << 32;  // indices that a key can hold

// `value` is anything but NaN; -0 counts, and comes back, as 0.
ECHO_HD uint64_t rank_key(float value, int64_t index) {
  const float no_negative_zero = value + 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &no_negative_zero, sizeof(bits));
  const uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t{~ascending} << 32 | static_cast<uint64_t>(index);
}

ECHO_HD int64_t key_index(uint64_t key) { return static_cast<int64_t>(key & 0xffffffffu); }

ECHO_HD float key_value(uint64_t key) {
  const uint32_t ascending = ~static_cast<uint32_t>(key >> 32);
  const uint32_t bits = ascending >> 31 ? ascending & 0x7fffffffu : ~ascending;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace vllm_echo
