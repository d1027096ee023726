// SPDX-License-Identifier: Apache-2.0
#include "../include/tree_mask.h"
#include "device.cuh"

namespace vllm_echo::cuda {
namespace {

constexpr int kScanThreads = 256;
constexpr int kPackThreads = 128;

__device__ int64_t nodes_of(const PackTrees& p, int64_t request) {
  const int64_t count = p.num_nodes[request];
  return count < 0 ? 0 : count > p.width ? p.width : count;
}

// Prefix sums of 1 + nodes: one block, a piece of the requests after the other.
__global__ void __launch_bounds__(kScanThreads) sum_rows(PackTrees p) {
  __shared__ int64_t warp_sums[kScanThreads / kWarp];
  int64_t before = 0;
  for (int64_t first = 0; first < p.num_requests; first += kScanThreads) {
    const int64_t request = first + threadIdx.x;
    const int64_t rows = request < p.num_requests ? 1 + nodes_of(p, request) : 0;
    int64_t sum = rows;  // of this warp, up to this lane
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int64_t lower = __shfl_up_sync(kAllLanes, static_cast<long long>(sum), offset);
      if (lane() >= offset) sum += lower;
    }
    if (lane() == kWarp - 1) warp_sums[warp()] = sum;
    __syncthreads();
    int64_t total = 0;
    for (int w = 0; w < kScanThreads / kWarp; ++w) {
      if (w < warp()) sum += warp_sums[w];
      total += warp_sums[w];
    }
    if (request < p.num_requests) {
      const int64_t end = before + sum;
      p.cu_rows[request + 1] = static_cast<int32_t>(end < p.max_rows ? end : p.max_rows);
    }
    before += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) p.cu_rows[0] = 0;
}

__device__ void write_row(const PackTrees& p, int64_t row, int32_t token, int32_t parent,
                          int32_t depth) {
  p.tokens_out[row] = token;
  p.parents_out[row] = parent;
  p.depths_out[row] = depth;
}

// The parent of a node, -1 for the root, -2 if it does not lie before the node: then the node is
// detached, and no walk reaches it.
__device__ int64_t parent_of(const int32_t* parents, int64_t node) {
  const int64_t parent = parents[node];
  return parent >= -1 && parent < node ? parent : -2;
}

// One block a request. Each row climbs to its root by itself: a parent lies before its child, so
// the climb ends.
__global__ void __launch_bounds__(kPackThreads) pack_request(PackTrees p) {
  const int64_t request = blockIdx.x;
  const int64_t first = p.cu_rows[request];
  const int64_t num_rows = p.cu_rows[request + 1] - first;
  const int32_t* parents = p.parents.data + request * p.parents.stride;
  for (int64_t row = threadIdx.x; row < num_rows; row += kPackThreads) {
    uint64_t* bits = p.ancestors + (first + row) * p.num_words;
    for (int64_t word = 0; word < p.num_words; ++word) bits[word] = 0;
    int64_t node = row - 1;
    if (node < 0) {
      write_row(p, first, -1, -1, 0);
    } else {
      const int64_t parent = parent_of(parents, node);
      write_row(p, first + row, p.tokens.data[request * p.tokens.stride + node],
                static_cast<int32_t>(parent < -1 ? -1 : parent + 1),
                p.depths.data[request * p.depths.stride + node]);
    }
    while (node >= -1) {
      const int64_t bit = node + 1;
      bits[bit / kMaskWordBits] |= uint64_t{1} << (bit % kMaskWordBits);
      node = node < 0 ? -2 : parent_of(parents, node);
    }
  }
}

// Rows that belong to no request.
__global__ void __launch_bounds__(kPackThreads) pad_rows(PackTrees p) {
  const int64_t used = p.num_requests > 0 ? p.cu_rows[p.num_requests] : 0;
  const int64_t step = int64_t{gridDim.x} * kPackThreads;
  for (int64_t row = used + int64_t{blockIdx.x} * kPackThreads + threadIdx.x; row < p.max_rows;
       row += step) {
    write_row(p, row, -1, -1, 0);
    for (int64_t word = 0; word < p.num_words; ++word) p.ancestors[row * p.num_words + word] = 0;
  }
}

}  // namespace

cudaError_t pack_trees(const PackTrees& p, cudaStream_t stream) {
  sum_rows<<<1, kScanThreads, 0, stream>>>(p);
  if (p.num_requests > 0) {
    pack_request<<<static_cast<unsigned>(p.num_requests), kPackThreads, 0, stream>>>(p);
  }
  if (p.max_rows > 0) pad_rows<<<8, kPackThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace vllm_echo::cuda
