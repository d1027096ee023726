// SPDX-License-Identifier: Apache-2.0
// The CPU operators that bindings.cpp registers; their contracts are documented in
// vllm_echo/ops.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace vllm_echo::cpu {

using torch::stable::Tensor;

void tree_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                    const Tensor& block_table, const Tensor& cu_rows, const Tensor& context_lens,
                    const Tensor& mask, double scale, double softcap, Tensor out);

void commit_kv(std::vector<Tensor> kv_caches, const Tensor& block_table, const Tensor& root_slots,
               const Tensor& path_rows, const Tensor& path_lens);

std::tuple<Tensor, Tensor, Tensor> accept_paths(const Tensor& target_tokens, const Tensor& cu_rows,
                                                const Tensor& tokens, const Tensor& parents);

std::tuple<Tensor, Tensor, Tensor> accept_greedy(const Tensor& logits, const Tensor& cu_rows,
                                                 const Tensor& tokens, const Tensor& parents);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pack_trees(const Tensor& tokens,
                                                              const Tensor& parents,
                                                              const Tensor& depths,
                                                              const Tensor& num_nodes);

std::tuple<Tensor, Tensor, Tensor, Tensor> rank_trees(const Tensor& tokens, const Tensor& parents,
                                                      const Tensor& depths, const Tensor& scores,
                                                      int64_t max_nodes);

Tensor best_paying(const Tensor& scores, const Tensor& caps, const Tensor& added_ms,
                   int64_t num_requests, double plain_ms);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> next_frontier(
    const Tensor& tokens, const Tensor& scores, const Tensor& requests, const Tensor& own_bits,
    int64_t top_k, std::optional<Tensor> previous_requests, std::optional<Tensor> ancestors);

std::tuple<Tensor, Tensor> read_trees(const Tensor& tokens, const Tensor& parents,
                                      const Tensor& depths, const Tensor& num_nodes,
                                      const Tensor& slots, const Tensor& scheduled,
                                      const Tensor& num_scheduled);

// "simd=<level>;torch=<version built against>;compiler=<version>"
std::string build_info();

void set_simd_level(std::string name);

}  // namespace vllm_echo::cpu
