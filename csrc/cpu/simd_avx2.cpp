// SPDX-License-Identifier: Apache-2.0
// The kernels for CPUs with AVX2, whatever the compiler's flags: they are compiled for it
// here and nowhere else.
#if defined(__x86_64__)

// Before the target: inline functions of the standard library must not be compiled for it.
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define ECHO_AVX2  // not __AVX2__: GCC's preprocessor does not see the pragma
#define ECHO_SIMD_LEVEL avx2
#define ECHO_LANES 8
#define ECHO_VECS_PER_PASS 2

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
