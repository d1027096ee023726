// SPDX-License-Identifier: Apache-2.0
#include "../include/tree_mask.h"
#include "device.cuh"
#include "floats.cuh"

namespace vllm_echo::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kRowsAtOnce = 4;  // keys in flight: their loads do not wait for one another

// The next set bits of a mask row, from low to high.
class VisibleRows {
 public:
  __device__ VisibleRows(const uint64_t* mask, int64_t num_bits)
      : mask_(mask), num_bits_(num_bits) {
    load();
  }

  // -1 when there are no more.
  __device__ int64_t next() {
    while (bits_ == 0) {
      if (++word_ * kMaskWordBits >= num_bits_) return -1;
      load();
    }
    const int bit = __ffsll(static_cast<long long>(bits_)) - 1;
    bits_ &= bits_ - 1;
    return word_ * kMaskWordBits + bit;
  }

 private:
  __device__ void load() {
    bits_ = word_ * kMaskWordBits < num_bits_ ? mask_word_in_range(mask_, word_, 0, num_bits_) : 0;
  }

  const uint64_t* mask_;
  int64_t num_bits_;
  int64_t word_ = 0;
  uint64_t bits_ = 0;
};

// The request of a row: the last whose first row is not behind it. Every warp looks for its own.
__device__ int64_t request_of(const TreePart& p, int64_t row) {
  int64_t low = 0;
  int64_t high = p.num_requests;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (p.cu_rows[middle] <= row ? low : high) = middle;
  }
  return low;
}

// One warp for a row and a query head: lane l holds dimensions l * kEach .. of queries, keys and
// outputs. A row sees its ancestors and itself, a handful of rows, so it reads those and no others;
// heads that share keys find them in the cache.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kWarps* kWarp) attend(TreePart p) {
  constexpr int kEach = kHeadDim / kWarp;
  using Own = Lanes<T, kEach>;
  const int64_t index = int64_t{blockIdx.x} * kWarps + warp();
  if (index >= p.num_rows * p.num_heads) return;
  const int64_t row = index / p.num_heads;
  const int64_t head = index % p.num_heads;
  const int64_t kv_head = head / (p.num_heads / p.num_kv_heads);
  T* out = static_cast<T*>(p.out) + index * kHeadDim;

  float query[kEach];
  float sum[kEach];
  const T* q = static_cast<const T*>(p.query) + row * p.query_row + head * p.query_head;
  const Own own = reinterpret_cast<const Own*>(q)[lane()];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    query[i] = own.get(i) * p.scale;
    sum[i] = 0.0f;
  }
  float highest = -INFINITY;
  float total = 0.0f;
  const int64_t request = request_of(p, row);
  const int64_t first = p.cu_rows[request];
  const int64_t end = p.num_requests > 0 ? p.cu_rows[request + 1] : 0;
  const bool inside = 0 <= first && first <= row && row < end;
  const int64_t num_rows = inside ? (end < p.num_rows ? end : p.num_rows) - first : 0;
  const int64_t words = p.num_words * kMaskWordBits;
  VisibleRows visible(p.ancestors + row * p.ancestor_stride, num_rows < words ? num_rows : words);
  const int64_t own_first = inside ? first : 0;
  const T* keys = static_cast<const T*>(p.key) + own_first * p.key_row + kv_head * p.key_head;
  const T* values =
      static_cast<const T*>(p.value) + own_first * p.value_row + kv_head * p.value_head;
  for (bool more = true; more;) {
    int64_t rows[kRowsAtOnce];
    float score[kRowsAtOnce];
#pragma unroll
    for (int n = 0; n < kRowsAtOnce; ++n) rows[n] = visible.next();
    more = rows[kRowsAtOnce - 1] >= 0;
#pragma unroll
    for (int n = 0; n < kRowsAtOnce; ++n) {
      score[n] = 0.0f;
      if (rows[n] < 0) continue;
      const Own key = reinterpret_cast<const Own*>(keys + rows[n] * p.key_row)[lane()];
#pragma unroll
      for (int i = 0; i < kEach; ++i) score[n] += query[i] * key.get(i);
    }
    float new_highest = highest;
#pragma unroll
    for (int n = 0; n < kRowsAtOnce; ++n) {
      score[n] = sum_over_warp(score[n]);
      if (p.softcap > 0.0f) score[n] = p.softcap * tanhf(score[n] / p.softcap);
      if (rows[n] < 0) score[n] = -INFINITY;
      if (score[n] > new_highest || score[n] != score[n]) new_highest = score[n];  // NaN stays
    }
    if (new_highest == -INFINITY) continue;  // nothing visible, or all scores are -inf
    const float decay = expf(highest - new_highest);
    highest = new_highest;
    total *= decay;
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum[i] *= decay;
#pragma unroll
    for (int n = 0; n < kRowsAtOnce; ++n) {
      if (rows[n] < 0) continue;
      const float weight = expf(score[n] - highest);
      total += weight;
      const Own value = reinterpret_cast<const Own*>(values + rows[n] * p.value_row)[lane()];
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum[i] += weight * value.get(i);
    }
  }
  Own result;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    from_float(total == 0.0f ? 0.0f : sum[i] / total, &result.values[i]);
  }
  reinterpret_cast<Own*>(out)[lane()] = result;
  if (lane() == 0) {
    p.lse[head * p.num_rows + row] = total == 0.0f ? -INFINITY : highest + logf(total);
  }
}

template <typename T>
cudaError_t attend_heads(const TreePart& p, cudaStream_t stream) {
  const int64_t warps = p.num_rows * p.num_heads;
  const unsigned blocks = static_cast<unsigned>((warps + kWarps - 1) / kWarps);
  constexpr int kThreads = kWarps * kWarp;
  switch (p.head_dim) {
    case 64:
      attend<T, 64><<<blocks, kThreads, 0, stream>>>(p);
      break;
    case 96:
      attend<T, 96><<<blocks, kThreads, 0, stream>>>(p);
      break;
    case 128:
      attend<T, 128><<<blocks, kThreads, 0, stream>>>(p);
      break;
    case 256:
      attend<T, 256><<<blocks, kThreads, 0, stream>>>(p);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t tree_part_attention(const TreePart& p, cudaStream_t stream) {
  if (p.num_rows == 0 || p.num_heads == 0) return cudaSuccess;
  switch (p.element) {
    case Element::kFloat32:
      return attend_heads<float>(p, stream);
    case Element::kBfloat16:
      return attend_heads<Bfloat16>(p, stream);
    case Element::kFloat16:
      return attend_heads<Float16>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace vllm_echo::cuda
