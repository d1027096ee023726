// SPDX-License-Identifier: Apache-2.0
// Noise of a draw, a function of the request's seed, the position and the token alone, as vLLM's
// Model Runner V2 has it (v1/worker/gpu/sample/gumbel.py): the same token draws the same noise
// wherever it is verified, so a path that is walked gives the tokens of plain decoding.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace vllm_echo {

ECHO_HD uint32_t rotate_left(uint32_t value, int by) { return value << by | value >> (32 - by); }

ECHO_HD uint32_t mix(uint32_t hash, uint32_t key) {
  key *= 0xCC9E2D51u;
  key = rotate_left(key, 15);
  key *= 0x1B873593u;
  hash = rotate_left(hash ^ key, 13);
  return hash * 5u + 0xE6546B64u;
}

// MurmurHash3 (32 bits) of seed, position and token; this part is the same for all tokens.
ECHO_HD uint32_t hash_draw(int64_t seed, int64_t position) {
  const uint64_t bits = static_cast<uint64_t>(seed);
  uint32_t hash = mix(0u, static_cast<uint32_t>(bits));
  hash = mix(hash, static_cast<uint32_t>(bits >> 32));
  return mix(hash, static_cast<uint32_t>(static_cast<uint64_t>(position)));
}

ECHO_HD uint32_t hash_token(uint32_t draw, uint32_t token) {
  uint32_t hash = mix(draw, token) ^ 16u;  // 16 bytes were hashed
  hash ^= hash >> 16;
  hash *= 0x85EBCA6Bu;
  hash ^= hash >> 13;
  hash *= 0xC2B2AE35u;
  return hash ^ (hash >> 16);
}

// (hash + 0.5) / 2^32, correctly rounded: both halves are exact. Above 0; 1 for the largest.
ECHO_HD float uniform_of(uint32_t hash) {
  const float high = static_cast<float>(static_cast<int32_t>(hash >> 16));
  const float low = static_cast<float>(static_cast<int32_t>(hash & 0xFFFFu));
  return high * 1.52587890625e-05f + (low + 0.5f) * 2.3283064365386963e-10f;
}

// -log(-log(1 - u)): Gumbel noise whose large values, which win, come from small u, where float32
// is finest. `Log` is the natural logarithm to use.
template <typename Log>
ECHO_HD float gumbel_of(float u, const Log& log) {
  float series = 1.0f / 8.0f;
  series = 1.0f / 7.0f + u * series;
  series = 1.0f / 6.0f + u * series;
  series = 1.0f / 5.0f + u * series;
  series = 1.0f / 4.0f + u * series;
  series = 1.0f / 3.0f + u * series;
  series = 1.0f / 2.0f + u * series;
  series = 1.0f + u * series;
  const float rest = 1.0f - u;
  const float log1m =
      u < 0.25f ? -u * series : log(rest > 5.960464477539063e-08f ? rest : 5.960464477539063e-08f);
  return -log(-log1m);
}

}  // namespace vllm_echo
