// SPDX-License-Identifier: Apache-2.0
// The kernels with the compiler's baseline instruction set: any CPU.
#define ECHO_SIMD_LEVEL portable
#define ECHO_LANES 4
#define ECHO_VECS_PER_PASS 2

#include "kernels.h"
