// SPDX-License-Identifier: Apache-2.0
// The kernels for CPUs with AVX512 and its products of bfloat16, whatever the compiler's flags:
// they are compiled for it here and nowhere else.
#if defined(__x86_64__)

// Before the target: inline functions of the standard library must not be compiled for it.
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__clang__)
#pragma clang attribute push(                                                          \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c")
#endif

#define ECHO_AVX512  // not __AVX512F__: GCC's preprocessor does not see the pragma
#define ECHO_BF16_DOT
#define ECHO_SIMD_LEVEL avx512bf16
#define ECHO_LANES 16
#define ECHO_VECS_PER_PASS 4

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
