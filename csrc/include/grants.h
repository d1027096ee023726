// SPDX-License-Identifier: Apache-2.0
// The elastic scheduler, phase 1: who may go deeper, and who gets the node for it.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"
#include "probability.h"

namespace vllm_echo {

// A request takes part while it is active and its layer holds a candidate at all.
ECHO_HD bool takes_part(bool active, float best) { return active && best > -INFINITY; }

// What a layer more is expected to be worth to one request, in milliseconds, under goodput.
struct ExpectedGain {
  double best_child;    // mean acceptance probability of an accepted node's likeliest child
  double price;         // acceptance probability from which a node pays
  double ms_per_token;  // what a token is worth
  double request_ms;    // the request's own part of the draft forward

  ECHO_HD double of(float best) const {
    return (probability(best) * best_child - price) * ms_per_token - request_ms;
  }
};

}  // namespace vllm_echo
