// SPDX-License-Identifier: Apache-2.0
// The size of a step: how many of the likeliest nodes make its tokens come fastest.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "node_key.h"

namespace vllm_echo {

struct StepSizes {
  const int64_t* keys;     // [most] of acceptance probabilities, ascending: the likeliest first
  const double* added_ms;  // [most + 1] what 0 to most nodes add to the step
  int64_t most;
  int64_t num_requests;  // tokens that come in any case
  double plain_ms;       // and the time they take
};

// Of equally fast sizes the smallest; a size whose time is no number is never taken.
ECHO_HD int64_t fastest_size(const StepSizes& step) {
  const double requests = static_cast<double>(step.num_requests);
  int64_t best = 0;
  double fastest = requests / step.plain_ms;
  double accepted = 0.0;
  for (int64_t size = 1; size <= step.most; ++size) {
    accepted += node_value(step.keys[size - 1]);
    const double speed = (requests + accepted) / (step.plain_ms + step.added_ms[size]);
    if (!(speed > fastest)) continue;
    fastest = speed;
    best = size;
  }
  return best;
}

}  // namespace vllm_echo
