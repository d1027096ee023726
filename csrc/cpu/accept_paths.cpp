// SPDX-License-Identifier: Apache-2.0
#include "../include/accept_paths.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "checks.h"
#include "ops.h"

namespace vllm_echo::cpu {
namespace {

int64_t max_nodes(const int32_t* cu_rows, int64_t num_requests) {
  int64_t nodes = 0;
  for (int64_t r = 0; r < num_requests; ++r)
    nodes = std::max<int64_t>(nodes, cu_rows[r + 1] - cu_rows[r] - 1);
  return nodes;
}

Tensor new_filled_int32(const Tensor& like, std::initializer_list<int64_t> shape, int32_t value) {
  const std::vector<int64_t> sizes(shape);
  Tensor tensor = torch::stable::new_empty(like, sizes, ScalarType::Int);
  std::fill_n(static_cast<int32_t*>(tensor.data_ptr()), tensor.numel(), value);
  return tensor;
}

template <typename Token>
void walk_all(const Token* target_tokens, const int32_t* cu_rows, const int32_t* tokens,
              const int32_t* parents, int64_t num_requests, int64_t capacity, int32_t* out_tokens,
              int32_t* path_rows, int32_t* num_accepted) {
  for (int64_t r = 0; r < num_requests; ++r) {
    const int64_t first = cu_rows[r];
    const GreedyWalk<Token> walk{target_tokens + first,
                                 tokens + first,
                                 parents + first,
                                 cu_rows[r + 1] - first,
                                 out_tokens + r * (capacity + 1),
                                 path_rows + r * capacity};
    num_accepted[r] = accept_path(walk);
  }
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> accept_paths(const Tensor& target_tokens, const Tensor& cu_rows,
                                                const Tensor& tokens, const Tensor& parents) {
  const bool wide = target_tokens.scalar_type() == ScalarType::Long;
  require_tensor(target_tokens, "accept_paths: target_tokens",
                 wide ? ScalarType::Long : ScalarType::Int, "int64 or int32", 1);
  require_int32(cu_rows, "accept_paths: cu_rows", 1);
  require_int32(tokens, "accept_paths: tokens", 1);
  require_int32(parents, "accept_paths: parents", 1);
  const int64_t num_rows = target_tokens.size(0);
  require_size(tokens, "accept_paths: tokens", 0, num_rows);
  require_size(parents, "accept_paths: parents", 0, num_rows);
  require_prefix_sums(cu_rows, "accept_paths: cu_rows", num_rows);

  const int64_t num_requests = cu_rows.size(0) - 1;
  const int32_t* rows = const_data<int32_t>(cu_rows);
  const int64_t capacity = max_nodes(rows, num_requests);
  Tensor out_tokens = new_filled_int32(tokens, {num_requests, capacity + 1}, -1);
  Tensor path_rows = new_filled_int32(tokens, {num_requests, capacity}, -1);
  Tensor num_accepted = new_filled_int32(tokens, {num_requests}, 0);
  const auto walk = [&](const auto* targets) {
    walk_all(targets, rows, const_data<int32_t>(tokens), const_data<int32_t>(parents), num_requests,
             capacity, static_cast<int32_t*>(out_tokens.data_ptr()),
             static_cast<int32_t*>(path_rows.data_ptr()),
             static_cast<int32_t*>(num_accepted.data_ptr()));
  };
  if (wide) {
    walk(const_data<int64_t>(target_tokens));
  } else {
    walk(const_data<int32_t>(target_tokens));
  }
  return {out_tokens, path_rows, num_accepted};
}

}  // namespace vllm_echo::cpu
