// SPDX-License-Identifier: Apache-2.0
// The CPU operators that bindings.cpp registers; their contracts are documented in
// vllm_echo/ops/.
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
                                                const Tensor& tokens, const Tensor& parents,
                                                std::optional<int64_t> max_nodes);

std::tuple<Tensor, Tensor, Tensor> accept_greedy(const Tensor& logits, const Tensor& cu_rows,
                                                 const Tensor& tokens, const Tensor& parents,
                                                 std::optional<int64_t> max_nodes);

std::tuple<Tensor, Tensor, Tensor> accept_sampled(const Tensor& logits, const Tensor& cu_rows,
                                                  const Tensor& tokens, const Tensor& parents,
                                                  const Tensor& depths, const Tensor& temperatures,
                                                  const Tensor& seeds, const Tensor& root_positions,
                                                  std::optional<int64_t> max_nodes);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pack_trees(const Tensor& tokens,
                                                              const Tensor& parents,
                                                              const Tensor& depths,
                                                              const Tensor& num_nodes,
                                                              std::optional<int64_t> max_rows);

std::tuple<Tensor, Tensor, Tensor, Tensor> order_trees(const Tensor& tokens, const Tensor& parents,
                                                       const Tensor& depths, const Tensor& scores,
                                                       const Tensor& caps, const Tensor& deepest,
                                                       const Tensor& thresholds, int64_t rule,
                                                       bool width, int64_t max_nodes);

Tensor fastest_size(const Tensor& keys, const Tensor& added_ms, int64_t num_requests,
                    double plain_ms);

Tensor admit_nodes(const Tensor& keys, int64_t budget);

Tensor score_children(const Tensor& log_probs, const Tensor& requests, const Tensor& sampled,
                      const Tensor& curves);

Tensor append_layer(Tensor tokens, Tensor parents, Tensor scores, const Tensor& requests,
                    const Tensor& child_tokens, const Tensor& child_scores,
                    const Tensor& chain_only, std::optional<Tensor> parent_scores,
                    std::optional<Tensor> parent_columns, int64_t first_parent_column);

std::tuple<Tensor, Tensor> grant_layer(const Tensor& best, const Tensor& active, const Tensor& caps,
                                       const Tensor& deepest, Tensor num_layers, Tensor truncated,
                                       int64_t depth, std::optional<double> threshold,
                                       int64_t budget);

Tensor expect_gain(const Tensor& best, const Tensor& active, const Tensor& deepest,
                   const Tensor& sampled, const Tensor& best_child, int64_t depth, double price,
                   double ms_per_token, double request_ms, double layer_ms);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> next_frontier(
    const Tensor& tokens, const Tensor& scores, const Tensor& active, const Tensor& own_bits,
    int64_t top_k, std::optional<Tensor> previous_requests, std::optional<Tensor> ancestors);

std::tuple<Tensor, Tensor> read_trees(const Tensor& tokens, const Tensor& parents,
                                      const Tensor& depths, const Tensor& num_nodes,
                                      const Tensor& slots, const Tensor& scheduled,
                                      const Tensor& num_scheduled);

// "simd=<level>;torch=<version built against>;compiler=<version>;cuda=<architectures, or none>"
std::string build_info();

void set_simd_level(std::string name);

}  // namespace vllm_echo::cpu
