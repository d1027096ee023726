// SPDX-License-Identifier: Apache-2.0
// The greedy walk: follow, from the root, the child that carries the target's own next token.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace vllm_echo {

// The target's next token after a row. From an invalid row (a NaN among its logits) no walk goes
// on.
struct NextToken {
  int64_t token;
  bool valid;
};

// One request. All pointers are at the request's own first row; rows are local to it.
// `target(row)` gives the NextToken of a row; it is asked for visited rows only.
template <typename Target>
struct GreedyWalk {
  Target target;
  const int32_t* tokens;   // [num_rows] the token a node carries (entry of the root ignored)
  const int32_t* parents;  // [num_rows] -1 for the root, else a smaller row
  int64_t num_rows;        // root and nodes; 0: nothing to do
  int64_t capacity;        // most nodes of a path; a longer one is cut, which loses nothing
  int32_t*
      out_tokens;  // [capacity + 1], prefilled with -1: accepted tokens, then the target's last one
  int32_t* path_rows;  // [capacity], prefilled with -1: rows of the accepted nodes
};

// A parent must be an earlier row; -1 marks the root, or a detached node that no walk reaches.
ECHO_HD bool parents_are_valid(const int32_t* parents, int64_t num_rows) {
  for (int64_t row = 0; row < num_rows; ++row) {
    if (parents[row] < -1 || parents[row] >= row) return false;
  }
  return true;
}

// Returns the number of accepted nodes. One pass: children lie behind their parent, so the scan
// never turns back. Among siblings with the same token the first wins. A negative token never
// matches (it is padding).
template <typename Target>
ECHO_HD int32_t accept_path(const GreedyWalk<Target>& walk) {
  if (walk.num_rows == 0) return 0;
  int32_t accepted = 0;
  int64_t current = 0;
  NextToken next = walk.target(0);
  const int64_t end = parents_are_valid(walk.parents, walk.num_rows) ? walk.num_rows : 0;
  for (int64_t row = 1; row < end; ++row) {
    const bool matches = walk.tokens[row] >= 0 && walk.tokens[row] == next.token;
    if (walk.parents[row] != current || !matches) continue;
    if (accepted == walk.capacity || !next.valid) break;
    walk.out_tokens[accepted] = walk.tokens[row];
    walk.path_rows[accepted] = static_cast<int32_t>(row);
    ++accepted;
    current = row;
    next = walk.target(row);
  }
  walk.out_tokens[accepted] = static_cast<int32_t>(next.token);
  return accepted;
}

}  // namespace vllm_echo
