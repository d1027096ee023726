// SPDX-License-Identifier: Apache-2.0
#include "../include/accept_paths.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>

#include "../common/checks.h"
#include "../common/tensors.h"
#include "../include/keyed_noise.h"
#include "floats.h"
#include "ops.h"
#include "simd.h"

namespace vllm_echo::cpu {
namespace {

// The trees of a batch, checked, and room for their paths.
class Walks {
 public:
  Walks(const char* op, const Tensor& cu_rows, const Tensor& tokens, const Tensor& parents,
        int64_t num_rows, std::optional<int64_t> max_nodes) {
    const std::string name = op;
    require_int32(cu_rows, (name + ": cu_rows").c_str(), 1);
    require_int32(tokens, (name + ": tokens").c_str(), 1);
    require_int32(parents, (name + ": parents").c_str(), 1);
    require_size(tokens, (name + ": tokens").c_str(), 0, num_rows);
    require_size(parents, (name + ": parents").c_str(), 0, num_rows);
    require_prefix_sums(cu_rows, (name + ": cu_rows").c_str(), num_rows);
    num_requests_ = cu_rows.size(0) - 1;
    rows_ = const_data<int32_t>(cu_rows);
    for (int64_t r = 0; r < num_requests_; ++r)
      capacity_ = std::max<int64_t>(capacity_, rows_[r + 1] - rows_[r] - 1);
    require(!max_nodes || *max_nodes >= 0, op, ": max_nodes must not be negative, got ",
            max_nodes.value_or(0));
    capacity_ = max_nodes.value_or(capacity_);
    token_ = const_data<int32_t>(tokens);
    parent_ = const_data<int32_t>(parents);
    out_tokens_ = filled(tokens, {num_requests_, capacity_ + 1}, -1);
    path_rows_ = filled(tokens, {num_requests_, capacity_}, -1);
    num_accepted_ = filled(tokens, {num_requests_}, 0);
    out_token_ = data<int32_t>(out_tokens_);
    path_row_ = data<int32_t>(path_rows_);
    accepted_ = data<int32_t>(num_accepted_);
  }

  int64_t num_requests() const { return num_requests_; }

  // `target(row)` takes a row of the whole batch.
  template <typename Target>
  void walk(int64_t request, const Target& target) const {
    const int64_t first = rows_[request];
    const auto local = [&](int64_t row) { return target(first + row); };
    const GreedyWalk<decltype(local)> walk{local,
                                           token_ + first,
                                           parent_ + first,
                                           rows_[request + 1] - first,
                                           capacity_,
                                           out_token_ + request * (capacity_ + 1),
                                           path_row_ + request * capacity_};
    accepted_[request] = accept_path(walk);
  }

  std::tuple<Tensor, Tensor, Tensor> results() const {
    return {out_tokens_, path_rows_, num_accepted_};
  }

 private:
  static Tensor filled(const Tensor& like, std::initializer_list<int64_t> shape, int32_t value) {
    Tensor tensor = new_tensor(like, shape, ScalarType::Int);
    std::fill_n(data<int32_t>(tensor), tensor.numel(), value);
    return tensor;
  }

  int64_t num_requests_ = 0;
  const int32_t* rows_ = nullptr;
  int64_t capacity_ = 0;
  Tensor out_tokens_, path_rows_, num_accepted_;
  const int32_t* token_ = nullptr;
  const int32_t* parent_ = nullptr;
  int32_t* out_token_ = nullptr;
  int32_t* path_row_ = nullptr;
  int32_t* accepted_ = nullptr;
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor> accept_paths(const Tensor& target_tokens, const Tensor& cu_rows,
                                                const Tensor& tokens, const Tensor& parents,
                                                std::optional<int64_t> max_nodes) {
  const bool wide = target_tokens.scalar_type() == ScalarType::Long;
  require_tensor(target_tokens, "accept_paths: target_tokens",
                 wide ? ScalarType::Long : ScalarType::Int, "int64 or int32", 1);
  const Walks walks("accept_paths", cu_rows, tokens, parents, target_tokens.size(0), max_nodes);
  const auto walk_all = [&](const auto* targets) {
    const auto target = [targets](int64_t row) { return NextToken{targets[row], true}; };
    for (int64_t r = 0; r < walks.num_requests(); ++r) walks.walk(r, target);
  };
  if (wide) {
    walk_all(const_data<int64_t>(target_tokens));
  } else {
    walk_all(const_data<int32_t>(target_tokens));
  }
  return walks.results();
}

namespace {

// The logits of all rows, checked.
class LogitRows {
 public:
  LogitRows(const char* op, const Tensor& logits) {
    const std::string what = std::string(op) + ": logits";
    const FloatName dtype = float_of(logits, what.c_str());
    require_tensor(logits, what.c_str(), dtype.dtype, dtype.name, 2);
    type_ = dtype.type;
    vocab_ = logits.size(1);
    require(vocab_ > 0 && vocab_ <= INT32_MAX, what, " must have 1 to 2^31 - 1 columns, got ",
            vocab_);
    first_ = const_data<char>(logits);
    stride_ = logits.stride(0) * dtype.size;
  }

  NextToken next(int64_t row, const Draw& draw) const {
    const int64_t index = argmax_(first_ + row * stride_, vocab_, type_, draw);
    return index < 0 ? NextToken{-1 - index, false} : NextToken{index, true};
  }

 private:
  const ArgmaxKernel argmax_ = kernels().argmax_row;
  const char* first_;
  int64_t stride_;
  int64_t vocab_;
  FloatType type_;
};

// `target(request)` makes the function that gives the NextToken of a row.
template <typename TargetOf>
void walk_in_parallel(const Walks& walks, const TargetOf& target_of) {
  torch::stable::parallel_for(0, walks.num_requests(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) walks.walk(r, target_of(r));
  });
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> accept_greedy(const Tensor& logits, const Tensor& cu_rows,
                                                 const Tensor& tokens, const Tensor& parents,
                                                 std::optional<int64_t> max_nodes) {
  const LogitRows rows("accept_greedy", logits);
  const Walks walks("accept_greedy", cu_rows, tokens, parents, logits.size(0), max_nodes);
  walk_in_parallel(walks,
                   [&](int64_t) { return [&](int64_t row) { return rows.next(row, Draw{}); }; });
  return walks.results();
}

std::tuple<Tensor, Tensor, Tensor> accept_sampled(const Tensor& logits, const Tensor& cu_rows,
                                                  const Tensor& tokens, const Tensor& parents,
                                                  const Tensor& depths, const Tensor& temperatures,
                                                  const Tensor& seeds, const Tensor& root_positions,
                                                  std::optional<int64_t> max_nodes) {
  const LogitRows rows("accept_sampled", logits);
  const Walks walks("accept_sampled", cu_rows, tokens, parents, logits.size(0), max_nodes);
  require_int32(depths, "accept_sampled: depths", 1);
  require_float32(temperatures, "accept_sampled: temperatures", 1);
  require_int64(seeds, "accept_sampled: seeds", 1);
  require_int64(root_positions, "accept_sampled: root_positions", 1);
  require_size(depths, "accept_sampled: depths", 0, logits.size(0));
  require_size(temperatures, "accept_sampled: temperatures", 0, walks.num_requests());
  require_size(seeds, "accept_sampled: seeds", 0, walks.num_requests());
  require_size(root_positions, "accept_sampled: root_positions", 0, walks.num_requests());
  const int32_t* depth = const_data<int32_t>(depths);
  const float* temperature = const_data<float>(temperatures);
  const int64_t* seed = const_data<int64_t>(seeds);
  const int64_t* position = const_data<int64_t>(root_positions);
  walk_in_parallel(walks, [&](int64_t r) {
    return [&, r](int64_t row) {
      return rows.next(row, Draw{temperature[r], hash_draw(seed[r], position[r] + depth[row])});
    };
  });
  return walks.results();
}

}  // namespace vllm_echo::cpu
