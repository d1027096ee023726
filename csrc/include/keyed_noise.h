// SPDX-License-Identifier: Apache-2.0
// Noise of a draw, a function of the request's seed, the position and the token alone, as vLLM's
// Model Runner V2 has it (v1/worker/gpu/sample/gumbel.py): the same token draws the same noise
// wherever it is verified, so a path that is walked gives the tokens of plain decoding.
//
// `Bits` is uint32_t and `Value` float, or vectors of them.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace vllm_echo {

template <typename Bits>
ECHO_HD Bits rotate_left(Bits value, int by) {
  return value << by | value >> (32 - by);
}

template <typename Bits>
ECHO_HD Bits mix(Bits hash, Bits key) {
  key = rotate_left(key * 0xCC9E2D51u, 15) * 0x1B873593u;
  return rotate_left(hash ^ key, 13) * 5u + 0xE6546B64u;
}

// MurmurHash3 (32 bits) of seed, position and token; this part is the same for all tokens.
ECHO_HD uint32_t hash_draw(int64_t seed, int64_t position) {
  const uint64_t bits = static_cast<uint64_t>(seed);
  uint32_t hash = mix(uint32_t{0}, static_cast<uint32_t>(bits));
  hash = mix(hash, static_cast<uint32_t>(bits >> 32));
  return mix(hash, static_cast<uint32_t>(static_cast<uint64_t>(position)));
}

template <typename Bits>
ECHO_HD Bits hash_token(Bits draw, Bits token) {
  Bits hash = mix(draw, token) ^ 16u;  // 16 bytes were hashed
  hash ^= hash >> 16;
  hash *= 0x85EBCA6Bu;
  hash ^= hash >> 13;
  hash *= 0xC2B2AE35u;
  return hash ^ (hash >> 16);
}

// (hash + 0.5) / 2^32, correctly rounded, from the hash's halves, which are exact.
template <typename Value>
ECHO_HD Value uniform_of(Value high, Value low) {
  return high * 1.52587890625e-05f + (low + 0.5f) * 2.3283064365386963e-10f;
}

// -log(-log(1 - u)): Gumbel noise whose large values, which win, come from small u, where float32
// is finest. `log` is the natural logarithm to use.
template <typename Value, typename Log>
ECHO_HD Value gumbel_of(Value u, const Log& log) {
  Value series = 1.0f / 7.0f + u * (1.0f / 8.0f);
  series = 1.0f / 6.0f + u * series;
  series = 1.0f / 5.0f + u * series;
  series = 1.0f / 4.0f + u * series;
  series = 1.0f / 3.0f + u * series;
  series = 1.0f / 2.0f + u * series;
  series = 1.0f + u * series;
  const Value least = u * 0.0f + 5.960464477539063e-08f;  // 2^-24
  const Value rest = 1.0f - u;
  const Value far = log(rest > least ? rest : least);
  return -log(-(u < 0.25f ? -u * series : far));
}

}  // namespace vllm_echo
