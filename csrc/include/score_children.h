// SPDX-License-Identifier: Apache-2.0
// Calibrated scores: a child's log-probability becomes the log of its acceptance probability.
//
// exp and log are spelled out, without a branch, so that compilers turn loops over them into vector
// instructions: a call into libm for each costs several times as much. They are good to 1e-11. In
// double, because rounding in float32 would turn around the order of close children.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "host_device.h"

namespace vllm_echo {

template <typename To, typename From>
ECHO_HD To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// exp(x) for x <= 0; below -700, where doubles end, exp(-700). NaN stays NaN.
ECHO_HD double exp_of_negative(double x) {
  constexpr double kToInteger = 6755399441055744.0;  // 1.5 * 2^52: the sum's low bits are round(x)
  constexpr double kLn2High = 0x1.62e42fefa3800p-1;  // n * kLn2High is exact
  constexpr double kLn2Low = 0x1.ef35793c76730p-45;
  const double bounded = x < -700.0 ? -700.0 : x;
  const double shifted = bounded * 1.4426950408889634 + kToInteger;
  const double n = shifted - kToInteger;
  const double r = (bounded - n * kLn2High) - n * kLn2Low;  // |r| <= ln(2) / 2
  const double s = r * r;                                   // the Taylor series to r^10
  double even = s * (1.0 / 3628800) + 1.0 / 40320;
  double odd = s * (1.0 / 362880) + 1.0 / 5040;
  even = even * s + 1.0 / 720;
  odd = odd * s + 1.0 / 120;
  even = even * s + 1.0 / 24;
  odd = odd * s + 1.0 / 6;
  even = even * s + 1.0 / 2;
  odd = odd * s + 1.0;
  return (even * s + (odd * r + 1.0)) * bits_as<double>((bits_as<uint64_t>(shifted) + 1023) << 52);
}

// log((1 + f) / (1 - f)) for |f| <= 1/3: its series to f^23.
ECHO_HD double log_ratio(double f) {
  const double g = f * f;
  const double h = g * g;
  double even = h * (2.0 / 21) + 2.0 / 17;
  double odd = h * (2.0 / 23) + 2.0 / 19;
  even = even * h + 2.0 / 13;
  odd = odd * h + 2.0 / 15;
  even = even * h + 2.0 / 9;
  odd = odd * h + 2.0 / 11;
  even = even * h + 2.0 / 5;
  odd = odd * h + 2.0 / 7;
  even = even * h + 2.0;
  odd = odd * h + 2.0 / 3;
  return (odd * g + even) * f;
}

// log(x) for a positive, normal x.
ECHO_HD double log_of_positive(double x) {
  constexpr uint64_t kSqrtHalf = 0x3fe6a09e667f3bcd;
  constexpr uint64_t kOne = 0x3ff0000000000000;
  constexpr uint64_t kTwo52 = 0x4330000000000000;  // its low bits hold an integer
  const uint64_t bits = bits_as<uint64_t>(x) + (kOne - kSqrtHalf);
  const double n = bits_as<double>(bits >> 52 | kTwo52) - (4503599627370496.0 + 1023.0);
  const double m =
      bits_as<double>((bits & 0x000fffffffffffff) + kSqrtHalf);  // sqrt(1/2) to sqrt(2)
  return n * 0.6931471805599453 + log_ratio((m - 1.0) / (m + 1.0));
}

// log sigmoid(intercept + slope * logit). Never above 0, and rises with log_prob where slope > 0;
// -inf stays -inf, NaN stays NaN. log_prob = 0 counts as -1e-6: certainty has no finite logit.
ECHO_HD double calibrated_score(double log_prob, double intercept, double slope) {
  const double given = log_prob > -1e-6 ? -1e-6 : log_prob;
  const double chance = exp_of_negative(given);
  const double logit = given - log_of_positive(1.0 - chance);
  const double x = intercept + slope * logit;
  const double e = exp_of_negative(x < 0.0 ? x : -x);
  const double score = (x < 0.0 ? x : 0.0) - log_ratio(e / (e + 2.0));  // log(1 + e)
  return given < -std::numeric_limits<double>::max() ? given : score;
}

}  // namespace vllm_echo
