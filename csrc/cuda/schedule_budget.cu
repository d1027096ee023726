// SPDX-License-Identifier: Apache-2.0
#include "../include/grants.h"
#include "../include/rank_key.h"
#include "device.cuh"

namespace vllm_echo::cuda {
namespace {

constexpr int kWarpsOfLayers = 4;
constexpr int kGrantThreads = 512;
constexpr int kRankThreads = 128;
constexpr uint64_t kNone = ~uint64_t{0};  // behind every key

__device__ bool is_candidate(float score) { return score == score && score > -INFINITY; }

// Best path score of every layer: one warp a request.
__global__ void __launch_bounds__(kWarpsOfLayers* kWarp) find_best(ScheduleBudget p) {
  const int64_t request = int64_t{blockIdx.x} * kWarpsOfLayers + warp();
  if (request >= p.num_requests) return;
  const float* scores = p.scores + request * p.score_stride;
  const int32_t* depths = p.depths.data + request * p.depths.stride;
  for (int64_t depth = 0; depth < p.num_depths; ++depth) {
    float best = -INFINITY;
    for (int64_t c = lane(); c < p.num_candidates; c += kWarp) {
      if (depths[c] == depth + 1 && scores[c] > best) best = scores[c];
    }
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, offset));
    }
    if (lane() == 0) p.best[request * p.num_depths + depth] = best;
  }
}

// Which of a block's keys are taken.
struct Selection {
  uint64_t last;  // keys up to this one
  int64_t count;
};

// The `wanted` lowest of the keys that `key_at(i)` gives for i < size, kNone left out; all of them
// if there are no more. Keys differ, so a search for the last one, bit by bit, ends at one key.
template <typename KeyAt>
__device__ Selection select_lowest(int64_t size, int64_t wanted, const KeyAt& key_at,
                                   int64_t* scratch) {
  const auto count_up_to = [&](uint64_t limit) {
    int64_t count = 0;
    for (int64_t i = threadIdx.x; i < size; i += kGrantThreads) count += key_at(i) <= limit;
    return sum_over_block(count, scratch);
  };
  const int64_t all = count_up_to(kNone - 1);
  if (all <= wanted) return {kNone - 1, all};
  if (wanted <= 0) return {0, 0};
  uint64_t low = 0;  // the last key taken is at or above it
  for (uint64_t bit = uint64_t{1} << 63; bit > 0; bit >>= 1) {
    if (count_up_to(low + bit - 1) < wanted) low += bit;
  }
  return {low, wanted};
}

// Phase 1, depth by depth, in one block. `num_nodes` holds the layers that a request would have
// drafted, `keys` the requests that want a node.
__global__ void __launch_bounds__(kGrantThreads) grant_depth(ScheduleBudget p) {
  __shared__ int64_t scratch[kGrantThreads / kWarp];
  int64_t budget = p.budget > 0 ? p.budget : 0;
  for (int64_t r = threadIdx.x; r < p.num_requests; r += kGrantThreads) {
    p.num_layers[r] = 0;
    p.truncated[r] = false;
    p.num_nodes[r] = p.caps[r] > 0 ? 1 : 0;
  }
  for (int64_t depth = 0; depth < p.num_depths; ++depth) {
    const float threshold = p.thresholds[depth];
    int64_t passed = 0;
    int64_t cut = 0;
    // Nobody is drafted for once nothing is left to spend.
    for (int64_t r = threadIdx.x; r < p.num_requests; r += kGrantThreads) {
      p.keys[r] = kNone;
      const float best = p.best[r * p.num_depths + depth];
      if (p.num_nodes[r] != depth + 1 || !takes_part(true, best)) continue;
      const float confidence = probability(best);
      if (threshold == threshold && !(confidence > threshold)) {
        p.truncated[r] = true;
        ++cut;
        continue;
      }
      ++passed;
      if (p.num_layers[r] < p.caps[r]) p.keys[r] = rank_key(confidence, r);
    }
    passed = sum_over_block(passed, scratch);
    cut = sum_over_block(cut, scratch);
    const Selection granted =
        select_lowest(p.num_requests, budget, [&](int64_t r) { return p.keys[r]; }, scratch);
    budget -= granted.count;
    for (int64_t r = threadIdx.x; r < p.num_requests; r += kGrantThreads) {
      if (granted.count == 0 || p.keys[r] > granted.last) continue;
      ++p.num_layers[r];
      if (budget > 0 && depth + 1 < p.deepest[r] && depth + 1 < p.num_depths) {
        p.num_nodes[r] = static_cast<int32_t>(depth + 2);
      }
    }
    if (threadIdx.x == 0) {
      p.gate_counts[3 * depth] = passed;
      p.gate_counts[3 * depth + 1] = cut;
      p.gate_counts[3 * depth + 2] = granted.count;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *p.budget_left = budget;
}

// One block a request: a candidate's place is the number of candidates before it.
__global__ void __launch_bounds__(kRankThreads) rank_candidates(ScheduleBudget p) {
  extern __shared__ uint64_t keys[];
  int32_t* places = reinterpret_cast<int32_t*>(keys + p.num_candidates);
  const int64_t request = blockIdx.x;
  const float* scores = p.scores + request * p.score_stride;
  const int32_t* depths = p.depths.data + request * p.depths.stride;
  for (int64_t c = threadIdx.x; c < p.num_candidates; c += kRankThreads) {
    const bool drafted = is_candidate(scores[c]) && depths[c] <= p.num_nodes[request];
    keys[c] = rank_key(drafted ? scores[c] : -INFINITY, c);
  }
  __syncthreads();
  for (int64_t c = threadIdx.x; c < p.num_candidates; c += kRankThreads) {
    int32_t place = 0;
    for (int64_t other = 0; other < p.num_candidates; ++other) place += keys[other] < keys[c];
    places[c] = place;
  }
  __syncthreads();
  for (int64_t c = threadIdx.x; c < p.num_candidates; c += kRankThreads) {
    if (places[c] >= p.max_nodes) continue;
    const int64_t parent = p.parents.data[request * p.parents.stride + c];
    const bool has_parent = parent >= 0 && parent < p.num_candidates;
    const int64_t at = request * p.max_nodes + places[c];
    p.tokens_out[at] = p.tokens.data[request * p.tokens.stride + c];
    // A wild parent is none: pack_trees detaches the node.
    p.parents_out[at] = has_parent ? places[parent] : parent == -1 ? -1 : -2;
    p.depths_out[at] = depths[c];
    p.scores_out[at] = key_value(keys[c]);
  }
}

// Phase 2, in one block: what is left goes to the best that is unspent, truncated requests first.
__global__ void __launch_bounds__(kGrantThreads) grant_width(ScheduleBudget p) {
  __shared__ int64_t scratch[kGrantThreads / kWarp];
  const int64_t size = p.num_requests * p.max_nodes;
  int64_t budget = p.width ? *p.budget_left : 0;
  for (int64_t i = threadIdx.x; i < size; i += kGrantThreads) {
    const int64_t r = i / p.max_nodes;
    const int64_t rank = i % p.max_nodes;
    const bool open = rank >= p.num_layers[r] && rank < p.caps[r] && isfinite(p.scores_out[i]);
    p.keys[i] = open ? rank_key(p.scores_out[i], i) : kNone;
  }
  for (int64_t r = threadIdx.x; r < p.num_requests; r += kGrantThreads) {
    p.num_nodes[r] = p.num_layers[r];
  }
  __syncthreads();
  for (int of_class = 1; of_class >= 0; --of_class) {
    const auto key_at = [&](int64_t i) {
      return p.truncated[i / p.max_nodes] == (of_class == 1) ? p.keys[i] : kNone;
    };
    const Selection taken = select_lowest(size, budget, key_at, scratch);
    for (int64_t r = threadIdx.x; r < p.num_requests; r += kGrantThreads) {
      for (int64_t i = r * p.max_nodes; taken.count > 0 && i < (r + 1) * p.max_nodes; ++i) {
        p.num_nodes[r] += key_at(i) <= taken.last;
      }
    }
    budget -= taken.count;
  }
}

}  // namespace

cudaError_t schedule_budget(const ScheduleBudget& p, cudaStream_t stream) {
  const unsigned requests = static_cast<unsigned>(p.num_requests);
  if (requests > 0 && p.num_depths > 0) {
    const unsigned blocks = (requests + kWarpsOfLayers - 1) / kWarpsOfLayers;
    find_best<<<blocks, kWarpsOfLayers * kWarp, 0, stream>>>(p);
  }
  grant_depth<<<1, kGrantThreads, 0, stream>>>(p);
  const size_t shared =
      static_cast<size_t>(p.num_candidates) * (sizeof(uint64_t) + sizeof(int32_t));
  if (requests > 0 && p.max_nodes > 0) {
    rank_candidates<<<requests, kRankThreads, shared, stream>>>(p);
  }
  grant_width<<<1, kGrantThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace vllm_echo::cuda
