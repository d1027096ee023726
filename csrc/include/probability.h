// SPDX-License-Identifier: Apache-2.0
// Scores are logs of probabilities.
#pragma once

#include <cmath>

#include "host_device.h"

namespace vllm_echo {

// exp in double, rounded once: equal scores are worth the same on every machine.
ECHO_HD float probability(float score) {
  return static_cast<float>(std::exp(static_cast<double>(score)));
}

}  // namespace vllm_echo
