// SPDX-License-Identifier: Apache-2.0
// As much of CUDA as csrc/cuda uses, on a CPU, for tests: the threads of a block are fibers of one
// thread, which take turns at barriers and warp operations only. In which order is a choice
// (set_order), so what depends on it shows.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(threads)

using std::isfinite;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
using cudaStream_t = void*;
inline const char* cudaGetErrorString(cudaError_t) { return "invalid value"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

constexpr int kWarp = 32;

// Who waits; a thread that has returned is waited for no longer.
struct Barrier {
  int members = 0;
  int waiting = 0;
  int64_t passed = 0;

  void check() {
    if (waiting > 0 && waiting == members) {
      waiting = 0;
      ++passed;
    }
  }
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  unsigned thread;
  bool done;
};

struct Block {
  std::vector<Fiber> fibers;
  Barrier all;
  std::vector<Barrier> warps;
  std::vector<uint64_t> exchanged;  // one a thread
  std::vector<char> shared;
  ucontext_t scheduler;
  Fiber* running = nullptr;
  std::function<void()> kernel;
};

inline Block block;
inline int order = 0;

inline void yield() { swapcontext(&block.running->context, &block.scheduler); }

inline void wait(Barrier& barrier) {
  const int64_t before = barrier.passed;
  ++barrier.waiting;
  barrier.check();
  while (barrier.passed == before) yield();
}

inline Barrier& warp_of(unsigned thread) { return block.warps[thread / kWarp]; }

inline void run_fiber() {
  block.kernel();
  Fiber& self = *block.running;
  self.done = true;
  --block.all.members;
  block.all.check();
  Barrier& warp = warp_of(self.thread);
  --warp.members;
  warp.check();
}

inline void run_block(unsigned num_threads) {
  constexpr size_t kStack = 64 << 10;
  block.all = {static_cast<int>(num_threads), 0, 0};
  block.warps.assign((num_threads + kWarp - 1) / kWarp, Barrier{});
  block.exchanged.assign(num_threads, 0);
  if (block.fibers.size() < num_threads) block.fibers.resize(num_threads);
  for (unsigned t = 0; t < num_threads; ++t) {
    Fiber& fiber = block.fibers[t];
    ++block.warps[t / kWarp].members;
    if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStack);
    fiber.thread = t;
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &block.scheduler;
    makecontext(&fiber.context, run_fiber, 0);
  }
  for (unsigned left = num_threads; left > 0;) {
    for (unsigned i = 0; i < num_threads; ++i) {
      // Forwards, backwards, or scattered.
      const unsigned t = order == 0   ? i
                         : order == 1 ? num_threads - 1 - i
                                      : (i * 7919u + static_cast<unsigned>(order)) % num_threads;
      Fiber& fiber = block.fibers[t];
      if (fiber.done) continue;
      block.running = &fiber;
      threadIdx = dim3(t, 0, 0);
      swapcontext(&block.scheduler, &fiber.context);
      if (fiber.done) --left;
    }
  }
}

inline void launch(dim3 grid, dim3 threads, size_t shared_bytes, std::function<void()> kernel) {
  block.kernel = std::move(kernel);
  gridDim = grid;
  blockDim = threads;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        block.shared.assign(shared_bytes + 16, static_cast<char>(0xA5));
        run_block(threads.x);
      }
    }
  }
}

inline void* dynamic_shared() { return block.shared.data(); }

// Every lane gives a value and reads that of another.
template <typename T>
T exchange(T value, int source_lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  const unsigned thread = threadIdx.x;
  std::memcpy(&block.exchanged[thread], &value, sizeof(T));
  wait(warp_of(thread));
  T other;
  std::memcpy(&other, &block.exchanged[thread / kWarp * kWarp + source_lane], sizeof(T));
  wait(warp_of(thread));
  return other;
}

inline int lane() { return static_cast<int>(threadIdx.x % kWarp); }

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::wait(cuda_on_cpu::block.all); }
inline void __syncwarp() { cuda_on_cpu::wait(cuda_on_cpu::warp_of(threadIdx.x)); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return cuda_on_cpu::exchange(value, cuda_on_cpu::lane() ^ mask);
}

template <typename T>
T __shfl_up_sync(unsigned, T value, int delta) {
  const int lane = cuda_on_cpu::lane();
  return cuda_on_cpu::exchange(value, lane >= delta ? lane - delta : lane);
}

inline unsigned __ballot_sync(unsigned, bool value) {
  unsigned bits = 0;
  for (int lane = 0; lane < cuda_on_cpu::kWarp; ++lane) {
    bits |= static_cast<unsigned>(cuda_on_cpu::exchange(static_cast<int>(value), lane)) << lane;
  }
  return bits;
}

inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }

template <typename T>
T __ldg(const T* from) {
  return *from;
}
