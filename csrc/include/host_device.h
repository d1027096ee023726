// SPDX-License-Identifier: Apache-2.0
// Marks the bodies that a CPU loop and a CUDA kernel share.
#pragma once

#if defined(__CUDACC__)
#define ECHO_HD __host__ __device__ __forceinline__
#else
// Always inlined: files built for different instruction sets include these bodies, and the linker
// would otherwise keep one copy for all of them, possibly the one this CPU cannot run.
#define ECHO_HD inline __attribute__((always_inline))
#endif
