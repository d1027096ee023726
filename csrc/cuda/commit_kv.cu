// SPDX-License-Identifier: Apache-2.0
#include "device.cuh"

namespace vllm_echo::cuda {
namespace {

constexpr int kThreads = 128;

// Byte offset of a slot in a plane, or -1 where the block table does not lead into the cache.
__device__ int64_t offset_of(const CommitKv& p, const int32_t* blocks, int64_t slot) {
  if (slot < 0 || slot / p.block_size >= p.table_width) return -1;
  const int64_t block = blocks[slot / p.block_size];
  if (block < 0 || block >= p.num_blocks) return -1;
  return block * p.block_stride + slot % p.block_size * p.slot_stride;
}

// A path that does not increase strictly, or whose row lies before its place, moves nothing.
__device__ bool is_ordered(const int32_t* rows, int64_t length) {
  for (int64_t k = 0; k < length; ++k) {
    if (rows[k] < (k == 0 ? 1 : rows[k - 1] + 1)) return false;
  }
  return true;
}

// One block for a request, a layer, and keys or values. Each thread owns some units of a slot and
// moves them for all rows in path order, so no thread waits for another: rows ascend, and a place
// is written only after it was read.
template <typename Unit>
__global__ void __launch_bounds__(kThreads) move_paths(LayerPlanes planes, CommitKv p) {
  const int64_t request = blockIdx.x;
  const int64_t layer = blockIdx.y;
  char* plane = blockIdx.z == 0 ? planes.keys[layer] : planes.values[layer];
  const int32_t* rows = p.path_rows.data + request * p.path_rows.stride;
  const int32_t* blocks = p.block_table + request * p.table_stride;
  const int64_t root = p.root_slots[request];
  const int64_t asked = p.path_lens[request];
  const int64_t length = asked < 0 ? 0 : asked > p.path_width ? p.path_width : asked;
  if (!is_ordered(rows, length)) return;
  const int64_t units_of_head = p.head_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t num_units = units_of_head * p.num_kv_heads;
  for (int64_t unit = threadIdx.x; unit < num_units; unit += kThreads) {
    char* base = plane + unit / units_of_head * p.head_stride +
                 unit % units_of_head * static_cast<int64_t>(sizeof(Unit));
    for (int64_t k = 0; k < length; ++k) {
      if (rows[k] == k + 1) continue;  // in place already
      const int64_t from = offset_of(p, blocks, root + rows[k]);
      const int64_t to = offset_of(p, blocks, root + k + 1);
      if (from < 0 || to < 0) break;
      *reinterpret_cast<Unit*>(base + to) = *reinterpret_cast<const Unit*>(base + from);
    }
  }
}

// Whether all units of `size` bytes are aligned.
bool fits(const LayerPlanes& planes, const CommitKv& p, int64_t size) {
  int64_t bits = p.head_bytes | p.block_stride | p.slot_stride | p.head_stride;
  for (int64_t layer = 0; layer < p.num_layers; ++layer) {
    bits |= reinterpret_cast<int64_t>(planes.keys[layer]);
    bits |= reinterpret_cast<int64_t>(planes.values[layer]);
  }
  return bits % size == 0;
}

}  // namespace

cudaError_t commit_kv(const LayerPlanes& planes, const CommitKv& p, cudaStream_t stream) {
  if (p.num_requests == 0 || p.num_layers == 0 || p.path_width == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(p.num_requests), static_cast<unsigned>(p.num_layers), 2);
  if (fits(planes, p, 16)) {
    move_paths<uint4><<<grid, kThreads, 0, stream>>>(planes, p);
  } else if (fits(planes, p, 2)) {
    move_paths<uint16_t><<<grid, kThreads, 0, stream>>>(planes, p);
  } else {
    move_paths<uint8_t><<<grid, kThreads, 0, stream>>>(planes, p);
  }
  return cudaGetLastError();
}

}  // namespace vllm_echo::cuda
