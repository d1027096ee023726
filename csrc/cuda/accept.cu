// SPDX-License-Identifier: Apache-2.0
#include "../include/keyed_noise.h"
#include "device.cuh"
#include "floats.cuh"

namespace vllm_echo::cuda {
namespace {

constexpr int kWalkThreads = 128;
constexpr int kReadThreads = 512;
constexpr int kWarps = kReadThreads / kWarp;

__device__ int32_t first_row(const Trees& trees, int64_t request) {
  const int32_t row = trees.cu_rows[request];
  return row < 0 ? 0 : row > trees.num_rows ? static_cast<int32_t>(trees.num_rows) : row;
}

// The rows of a request; none where the prefix sums are malformed.
struct Span {
  int64_t first, size;
};

__device__ Span span_of(const Trees& trees, int64_t request) {
  const int64_t first = first_row(trees, request);
  const int64_t size = first_row(trees, request + 1) - first;
  return {first, size < 0 ? 0 : size};
}

// The first child of `row` that carries `token`, or -1; all lanes of a warp look. A child lies
// behind its parent, so a wild parent, or a cycle, is never followed backwards.
__device__ int64_t find_child(const Trees& trees, const Span& span, int64_t row, int64_t token) {
  if (token < 0) return -1;
  for (int64_t start = row + 1; start < span.size; start += kWarp) {
    const int64_t candidate = start + lane();
    bool matches = false;
    if (candidate < span.size) {
      matches = trees.parents[span.first + candidate] == row &&
                trees.tokens[span.first + candidate] == token;
    }
    const unsigned found = __ballot_sync(kAllLanes, matches);
    if (found) return start + __ffs(static_cast<int>(found)) - 1;
  }
  return -1;
}

// Where the walk of one request stands, and what it leaves behind.
class Walk {
 public:
  __device__ Walk(const Trees& trees, const Paths& paths, int64_t request)
      : trees_(trees),
        span_(span_of(trees, request)),
        max_nodes_(paths.max_nodes),
        tokens_(paths.tokens + request * (paths.max_nodes + 1)),
        rows_(paths.rows + request * paths.max_nodes) {}

  __device__ bool empty() const { return span_.size == 0; }
  __device__ int64_t global_row() const { return span_.first + row_; }
  __device__ int32_t accepted() const { return accepted_; }

  // Whether each parent lies before its row; a request that breaks this accepts no node. By a whole
  // warp.
  __device__ bool is_sound() const {
    for (int64_t start = 0; start < span_.size; start += kWarp) {
      const int64_t row = start + lane();
      bool wild = false;
      if (row < span_.size) {
        const int64_t parent = trees_.parents[span_.first + row];
        wild = parent < -1 || parent >= row;
      }
      if (__ballot_sync(kAllLanes, wild)) return false;
    }
    return true;
  }

  // The target's token at the current row; false when the walk ends with it. By a whole warp.
  __device__ bool step(int64_t token, bool may_go_on) {
    if (lane() == 0) tokens_[accepted_] = static_cast<int32_t>(token);
    if (!may_go_on || accepted_ == max_nodes_) return false;
    const int64_t child = find_child(trees_, span_, row_, token);
    if (child < 0) return false;
    if (lane() == 0) rows_[accepted_] = static_cast<int32_t>(child);
    row_ = child;
    ++accepted_;
    return true;
  }

 private:
  const Trees& trees_;
  Span span_;
  int64_t max_nodes_;
  int32_t* tokens_;
  int32_t* rows_;
  int64_t row_ = 0;
  int32_t accepted_ = 0;
};

__device__ void clear_paths(const Paths& paths, int64_t request, int thread, int num_threads) {
  int32_t* tokens = paths.tokens + request * (paths.max_nodes + 1);
  int32_t* rows = paths.rows + request * paths.max_nodes;
  for (int64_t i = thread; i <= paths.max_nodes; i += num_threads) {
    tokens[i] = -1;
    if (i < paths.max_nodes) rows[i] = -1;
  }
}

// One warp a request.
__global__ void __launch_bounds__(kWalkThreads)
    walk_given(Trees trees, Targets targets, Paths paths) {
  const int64_t request = (int64_t{blockIdx.x} * kWalkThreads + threadIdx.x) / kWarp;
  if (request >= trees.num_requests) return;  // all lanes of the warp
  clear_paths(paths, request, lane(), kWarp);
  __syncwarp();
  Walk walk(trees, paths, request);
  if (!walk.empty()) {
    const bool sound = walk.is_sound();
    while (walk.step(targets.wide ? static_cast<const int64_t*>(targets.data)[walk.global_row()]
                                  : static_cast<const int32_t*>(targets.data)[walk.global_row()],
                     sound)) {
    }
  }
  if (lane() == 0) paths.num_accepted[request] = walk.accepted();
}

// The best of some entries of a row; the lower index wins among equals. A NaN marks the row.
struct Best {
  float value = -INFINITY;
  int32_t index = INT32_MAX;
  bool nan = false;

  __device__ void offer(float x, int32_t at) {
    if (x != x) {
      index = nan && index < at ? index : at;
      nan = true;
    } else if (!nan && (x > value || (x == value && at < index))) {
      value = x;
      index = at;
    }
  }

  __device__ void offer(const Best& other) {
    if (other.nan) {
      offer(NAN, other.index);
    } else if (other.index != INT32_MAX) {
      offer(other.value, other.index);
    }
  }
};

__device__ Best best_of_warp(Best best) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    Best other;
    other.value = __shfl_xor_sync(kAllLanes, best.value, offset);
    other.index = __shfl_xor_sync(kAllLanes, best.index, offset);
    other.nan = __shfl_xor_sync(kAllLanes, static_cast<int>(best.nan), offset) != 0;
    best.offer(other);
  }
  return best;
}

// How a row's logits become the numbers whose largest wins.
struct Draw {
  float temperature = 0.0f;
  uint32_t hash = 0;  // of seed and position

  __device__ float operator()(float logit, int32_t token) const {
    if (temperature == 0.0f) return logit;
    const uint32_t bits = hash_token(hash, static_cast<uint32_t>(token));
    const float high = static_cast<float>(static_cast<int32_t>(bits >> 16));
    const float low = static_cast<float>(static_cast<int32_t>(bits & 0xFFFFu));
    const auto log = [](float x) { return natural_log(x); };
    return divide(logit, temperature) + gumbel_of(uniform_of(high, low), log);
  }
};

template <typename T>
__device__ Best best_of_row(const T* row, int64_t vocab, const Draw& draw) {
  constexpr int kVector = 16 / sizeof(T);
  Best best;
  const bool aligned = reinterpret_cast<uintptr_t>(row) % 16 == 0;
  const int64_t whole = aligned ? vocab / kVector * kVector : 0;
  for (int64_t i = int64_t{threadIdx.x} * kVector; i < whole;
       i += int64_t{kReadThreads} * kVector) {
    const Vector<T> values = load_vector(row + i);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      best.offer(draw(values.get(j), static_cast<int32_t>(i + j)), static_cast<int32_t>(i + j));
    }
  }
  for (int64_t i = whole + threadIdx.x; i < vocab; i += kReadThreads) {
    best.offer(draw(to_float(row[i]), static_cast<int32_t>(i)), static_cast<int32_t>(i));
  }
  return best;
}

// One block a request: all threads read the row that the walk stands on, the first warp walks.
template <typename T>
__global__ void __launch_bounds__(kReadThreads)
    walk_logits(Trees trees, Logits logits, Paths paths) {
  __shared__ Best of_warp[kWarps];
  __shared__ int64_t next_row;
  const int64_t request = blockIdx.x;
  clear_paths(paths, request, static_cast<int>(threadIdx.x), kReadThreads);
  __syncthreads();
  Walk walk(trees, paths, request);
  int64_t row = walk.empty() ? -1 : walk.global_row();
  bool sound = true;
  if (warp() == 0 && row >= 0) sound = walk.is_sound();
  while (row >= 0) {
    Draw draw;
    if (logits.temperatures != nullptr) {
      draw.temperature = logits.temperatures[request];
      draw.hash =
          hash_draw(logits.seeds[request], logits.root_positions[request] + logits.depths[row]);
    }
    const T* values = static_cast<const T*>(logits.data) + row * logits.stride;
    const Best best = best_of_warp(best_of_row(values, logits.vocab, draw));
    if (lane() == 0) of_warp[warp()] = best;
    __syncthreads();
    if (warp() == 0) {
      Best whole;
      for (int w = 0; w < kWarps; ++w) whole.offer(of_warp[w]);
      // A row with a NaN accepts nothing: the request ends its step here.
      const bool goes_on =
          walk.step(whole.index == INT32_MAX ? 0 : whole.index, sound && !whole.nan);
      if (lane() == 0) next_row = goes_on ? walk.global_row() : -1;
    }
    __syncthreads();
    row = next_row;
  }
  if (threadIdx.x == 0) paths.num_accepted[request] = walk.accepted();
}

}  // namespace

cudaError_t accept_paths(const Trees& trees, const Targets& targets, const Paths& paths,
                         cudaStream_t stream) {
  if (trees.num_requests == 0) return cudaSuccess;
  constexpr int kRequests = kWalkThreads / kWarp;
  const int64_t blocks = (trees.num_requests + kRequests - 1) / kRequests;
  walk_given<<<static_cast<unsigned>(blocks), kWalkThreads, 0, stream>>>(trees, targets, paths);
  return cudaGetLastError();
}

cudaError_t accept_logits(const Trees& trees, const Logits& logits, const Paths& paths,
                          cudaStream_t stream) {
  if (trees.num_requests == 0) return cudaSuccess;
  const unsigned blocks = static_cast<unsigned>(trees.num_requests);
  switch (logits.element) {
    case Element::kFloat32:
      walk_logits<float><<<blocks, kReadThreads, 0, stream>>>(trees, logits, paths);
      break;
    case Element::kBfloat16:
      walk_logits<Bfloat16><<<blocks, kReadThreads, 0, stream>>>(trees, logits, paths);
      break;
    case Element::kFloat16:
      walk_logits<Float16><<<blocks, kReadThreads, 0, stream>>>(trees, logits, paths);
      break;
  }
  return cudaGetLastError();
}

}  // namespace vllm_echo::cuda
