// SPDX-License-Identifier: Apache-2.0
// The CUDA operators: checks what can be known without waiting for the device, allocates, launches.
// With ECHO_CUDA_ON_CPU, for tests, the same code takes CPU tensors and emulated launches.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../common/schemas.h"
#include "door.h"

namespace vllm_echo::cuda {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pack_trees_op(const Tensor& tokens,
                                                                 const Tensor& parents,
                                                                 const Tensor& depths,
                                                                 const Tensor& num_nodes,
                                                                 std::optional<int64_t> max_rows) {
  require_int32<kHere>(tokens, "pack_trees: tokens", 2);
  const int64_t num_requests = tokens.size(0);
  const int64_t width = tokens.size(1);
  require_int_table(parents, "pack_trees: parents", num_requests, width);
  require_int_table(depths, "pack_trees: depths", num_requests, width);
  require_vector(num_nodes, "pack_trees: num_nodes", ScalarType::Int, "int32", num_requests);
  const int64_t rows = require_given(max_rows, "pack_trees: max_rows");
  const OnDeviceOf device("pack_trees", tokens,
                          {{"parents", parents}, {"depths", depths}, {"num_nodes", num_nodes}});
  const int64_t num_words = (width + 64) / 64;
  Tensor cu_rows = new_ints(tokens, {num_requests + 1});
  Tensor out_tokens = new_ints(tokens, {rows});
  Tensor out_parents = new_ints(tokens, {rows});
  Tensor out_depths = new_ints(tokens, {rows});
  Tensor ancestors = new_tensor(tokens, {rows, num_words}, ScalarType::Long);
  const PackTrees args{table_of(tokens),
                       table_of(parents),
                       table_of(depths),
                       const_data<int32_t>(num_nodes),
                       num_requests,
                       width,
                       rows,
                       num_words,
                       data<int32_t>(cu_rows),
                       data<int32_t>(out_tokens),
                       data<int32_t>(out_parents),
                       data<int32_t>(out_depths),
                       data<uint64_t>(ancestors)};
  require_launch(pack_trees(args, device.stream()), "pack_trees");
  return {cu_rows, out_tokens, out_parents, out_depths, ancestors};
}

namespace {

Trees trees_of(const std::string& op, const Tensor& cu_rows, const Tensor& tokens,
               const Tensor& parents, int64_t num_rows) {
  require_int32<kHere>(cu_rows, (op + ": cu_rows").c_str(), 1);
  require(cu_rows.size(0) >= 1, op, ": cu_rows must have one entry more than there are requests");
  require_vector(tokens, op + ": tokens", ScalarType::Int, "int32", num_rows);
  require_vector(parents, op + ": parents", ScalarType::Int, "int32", num_rows);
  return {const_data<int32_t>(cu_rows), const_data<int32_t>(tokens), const_data<int32_t>(parents),
          cu_rows.size(0) - 1, num_rows};
}

// The results of a walk.
struct PathTensors {
  PathTensors(const Tensor& like, int64_t num_requests, int64_t max_nodes)
      : max_nodes(max_nodes),
        tokens(new_ints(like, {num_requests, max_nodes + 1})),
        rows(new_ints(like, {num_requests, max_nodes})),
        num_accepted(new_ints(like, {num_requests})) {}

  Paths paths() const {
    return {max_nodes, data<int32_t>(tokens), data<int32_t>(rows), data<int32_t>(num_accepted)};
  }

  int64_t max_nodes;
  Tensor tokens, rows, num_accepted;
};

Logits logits_of(const std::string& op, const Tensor& logits) {
  const std::string what = op + ": logits";
  const Element element = element_of(logits, what.c_str());
  require_tensor<kHere>(logits, what.c_str(), logits.scalar_type(), "", 2);
  const int64_t vocab = logits.size(1);
  require(vocab > 0 && vocab < INT32_MAX, what, " must have 1 to 2^31 - 2 columns, got ", vocab);
  return {logits.data_ptr(), element, logits.stride(0), vocab, nullptr, nullptr, nullptr, nullptr};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> accept_paths_op(const Tensor& target_tokens,
                                                   const Tensor& cu_rows, const Tensor& tokens,
                                                   const Tensor& parents,
                                                   std::optional<int64_t> max_nodes) {
  const bool wide = target_tokens.scalar_type() == ScalarType::Long;
  require_tensor<kHere>(target_tokens, "accept_paths: target_tokens",
                        wide ? ScalarType::Long : ScalarType::Int, "int64 or int32", 1);
  const Trees trees = trees_of("accept_paths", cu_rows, tokens, parents, target_tokens.size(0));
  const OnDeviceOf device(
      "accept_paths", tokens,
      {{"target_tokens", target_tokens}, {"cu_rows", cu_rows}, {"parents", parents}});
  const PathTensors out(tokens, trees.num_requests,
                        require_given(max_nodes, "accept_paths: max_nodes"));
  const Targets targets{target_tokens.data_ptr(), wide};
  require_launch(accept_paths(trees, targets, out.paths(), device.stream()), "accept_paths");
  return {out.tokens, out.rows, out.num_accepted};
}

std::tuple<Tensor, Tensor, Tensor> accept_greedy_op(const Tensor& logits, const Tensor& cu_rows,
                                                    const Tensor& tokens, const Tensor& parents,
                                                    std::optional<int64_t> max_nodes) {
  const Logits rows = logits_of("accept_greedy", logits);
  const Trees trees = trees_of("accept_greedy", cu_rows, tokens, parents, logits.size(0));
  const OnDeviceOf device("accept_greedy", tokens,
                          {{"logits", logits}, {"cu_rows", cu_rows}, {"parents", parents}});
  const PathTensors out(tokens, trees.num_requests,
                        require_given(max_nodes, "accept_greedy: max_nodes"));
  require_launch(accept_logits(trees, rows, out.paths(), device.stream()), "accept_greedy");
  return {out.tokens, out.rows, out.num_accepted};
}

std::tuple<Tensor, Tensor, Tensor> accept_sampled_op(
    const Tensor& logits, const Tensor& cu_rows, const Tensor& tokens, const Tensor& parents,
    const Tensor& depths, const Tensor& temperatures, const Tensor& seeds,
    const Tensor& root_positions, std::optional<int64_t> max_nodes) {
  const std::string op = "accept_sampled";
  Logits rows = logits_of(op, logits);
  const Trees trees = trees_of(op, cu_rows, tokens, parents, logits.size(0));
  const int64_t requests = trees.num_requests;
  require_vector(depths, op + ": depths", ScalarType::Int, "int32", logits.size(0));
  require_vector(temperatures, op + ": temperatures", ScalarType::Float, "float32", requests);
  require_vector(seeds, op + ": seeds", ScalarType::Long, "int64", requests);
  require_vector(root_positions, op + ": root_positions", ScalarType::Long, "int64", requests);
  rows.temperatures = const_data<float>(temperatures);
  rows.seeds = const_data<int64_t>(seeds);
  rows.root_positions = const_data<int64_t>(root_positions);
  rows.depths = const_data<int32_t>(depths);
  const OnDeviceOf device("accept_sampled", tokens,
                          {{"logits", logits},
                           {"cu_rows", cu_rows},
                           {"parents", parents},
                           {"depths", depths},
                           {"temperatures", temperatures},
                           {"seeds", seeds},
                           {"root_positions", root_positions}});
  const PathTensors out(tokens, requests, require_given(max_nodes, "accept_sampled: max_nodes"));
  require_launch(accept_logits(trees, rows, out.paths(), device.stream()), op.c_str());
  return {out.tokens, out.rows, out.num_accepted};
}

void commit_kv_op(std::vector<Tensor> kv_caches, const Tensor& block_table,
                  const Tensor& root_slots, const Tensor& path_rows, const Tensor& path_lens) {
  require_int32<kHere>(path_lens, "commit_kv: path_lens", 1);
  const int64_t num_requests = path_lens.size(0);
  require_int32<kHere>(block_table, "commit_kv: block_table", 2);
  require_size(block_table, "commit_kv: block_table", 0, num_requests);
  require_vector(root_slots, "commit_kv: root_slots", ScalarType::Int, "int32", num_requests);
  require_int32<kHere>(path_rows, "commit_kv: path_rows", 2);
  require_size(path_rows, "commit_kv: path_rows", 0, num_requests);
  require(static_cast<int64_t>(kv_caches.size()) <= kMaxLayers, "commit_kv: kv_caches has ",
          kv_caches.size(), " layers, but one launch moves those of ", kMaxLayers);
  if (kv_caches.empty()) return;

  const Tensor& first = kv_caches[0];
  LayerPlanes planes{};
  for (size_t layer = 0; layer < kv_caches.size(); ++layer) {
    const Tensor& cache = kv_caches[layer];
    const std::string what = "commit_kv: kv_caches[" + std::to_string(layer) + "]";
    require_tensor<kHere>(cache, what.c_str(), first.scalar_type(), "of kv_caches[0]", 5);
    require_size(cache, what.c_str(), 0, 2);
    const OnDeviceOf device("commit_kv", first, {{"kv_caches", cache}});
    for (int64_t dim = 0; dim < 5; ++dim) {
      require_size(cache, what.c_str(), dim, first.size(dim));
      require(cache.stride(dim) == first.stride(dim), what,
              " must have the strides of kv_caches[0]");
    }
    planes.keys[layer] = static_cast<char*>(cache.data_ptr());
    planes.values[layer] =
        planes.keys[layer] + cache.stride(0) * static_cast<int64_t>(cache.element_size());
  }
  const int64_t size = static_cast<int64_t>(first.element_size());
  require(first.size(2) > 0, "commit_kv: kv_caches[0] must have slots in its blocks");
  const CommitKv args{static_cast<int64_t>(kv_caches.size()),
                      first.size(1),
                      first.size(2),
                      first.size(3),
                      first.size(4) * size,
                      first.stride(1) * size,
                      first.stride(2) * size,
                      first.stride(3) * size,
                      const_data<int32_t>(block_table),
                      block_table.stride(0),
                      block_table.size(1),
                      const_data<int32_t>(root_slots),
                      table_of(path_rows),
                      path_rows.size(1),
                      const_data<int32_t>(path_lens),
                      num_requests};
  const OnDeviceOf device("commit_kv", first,
                          {{"block_table", block_table},
                           {"root_slots", root_slots},
                           {"path_rows", path_rows},
                           {"path_lens", path_lens}});
  require_launch(commit_kv(planes, args, device.stream()), "commit_kv");
}

std::tuple<Tensor, Tensor> tree_part_attention_op(const Tensor& query, const Tensor& key,
                                                  const Tensor& value, const Tensor& cu_rows,
                                                  const Tensor& ancestors, double scale,
                                                  double softcap) {
  const Element element = element_of(query, "tree_part_attention: query");
  const ScalarType dtype = query.scalar_type();
  require_tensor<kHere>(query, "tree_part_attention: query", dtype, "", 3);
  require_tensor<kHere>(key, "tree_part_attention: key", dtype, "of query", 3);
  require_tensor<kHere>(value, "tree_part_attention: value", dtype, "of query", 3);
  require_int32<kHere>(cu_rows, "tree_part_attention: cu_rows", 1);
  require_int64<kHere>(ancestors, "tree_part_attention: ancestors", 2);
  const int64_t num_rows = query.size(0);
  const int64_t num_heads = query.size(1);
  const int64_t num_kv_heads = key.size(1);
  const int64_t head_dim = query.size(2);
  require(head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 256,
          "tree_part_attention: query must have heads of 64, 96, 128 or 256, got ", head_dim);
  require(num_kv_heads > 0 && num_heads % num_kv_heads == 0, "tree_part_attention: query has ",
          num_heads, " heads, no multiple of the ", num_kv_heads, " of key");
  for (const auto& [tensor, what] :
       {std::pair<const Tensor&, const char*>{key, "tree_part_attention: key"},
        std::pair<const Tensor&, const char*>{value, "tree_part_attention: value"}}) {
    require_size(tensor, what, 0, num_rows);
    require_size(tensor, what, 1, num_kv_heads);
    require_size(tensor, what, 2, head_dim);
  }
  for (const auto& [tensor, what] :
       {std::pair<const Tensor&, const char*>{query, "tree_part_attention: query"},
        std::pair<const Tensor&, const char*>{key, "tree_part_attention: key"},
        std::pair<const Tensor&, const char*>{value, "tree_part_attention: value"}}) {
    const int64_t bytes = tensor.stride(0) * static_cast<int64_t>(tensor.element_size()) |
                          tensor.stride(1) * static_cast<int64_t>(tensor.element_size()) |
                          reinterpret_cast<int64_t>(tensor.data_ptr());
    require(bytes % 16 == 0, what, " must have rows and heads that begin at multiples of 16 bytes");
  }
  require_size(ancestors, "tree_part_attention: ancestors", 0, num_rows);
  require(cu_rows.size(0) >= 1,
          "tree_part_attention: cu_rows must have one entry more than there are requests");
  require(softcap >= 0, "tree_part_attention: softcap must not be negative, got ", softcap);
  const OnDeviceOf device(
      "tree_part_attention", query,
      {{"key", key}, {"value", value}, {"cu_rows", cu_rows}, {"ancestors", ancestors}});
  Tensor out = new_tensor(query, {num_rows, num_heads, head_dim}, dtype);
  Tensor lse = new_tensor(query, {num_heads, num_rows}, ScalarType::Float);
  const TreePart args{query.data_ptr(),
                      key.data_ptr(),
                      value.data_ptr(),
                      query.stride(0),
                      query.stride(1),
                      key.stride(0),
                      key.stride(1),
                      value.stride(0),
                      value.stride(1),
                      element,
                      const_data<int32_t>(cu_rows),
                      const_data<uint64_t>(ancestors),
                      ancestors.stride(0),
                      ancestors.size(1),
                      cu_rows.size(0) - 1,
                      num_rows,
                      num_heads,
                      num_kv_heads,
                      static_cast<int>(head_dim),
                      static_cast<float>(scale),
                      static_cast<float>(softcap),
                      out.data_ptr(),
                      data<float>(lse)};
  require_launch(tree_part_attention(args, device.stream()), "tree_part_attention");
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> schedule_budget_op(
    const Tensor& tokens, const Tensor& parents, const Tensor& depths, const Tensor& scores,
    const Tensor& caps, const Tensor& deepest, const Tensor& thresholds, int64_t budget, bool width,
    int64_t max_nodes) {
  require_float32<kHere>(scores, "schedule_budget: scores", 2);
  const int64_t num_requests = scores.size(0);
  const int64_t num_candidates = scores.size(1);
  require_int_table(tokens, "schedule_budget: tokens", num_requests, num_candidates);
  require_int_table(parents, "schedule_budget: parents", num_requests, num_candidates);
  require_int_table(depths, "schedule_budget: depths", num_requests, num_candidates);
  require_vector(caps, "schedule_budget: caps", ScalarType::Int, "int32", num_requests);
  require_vector(deepest, "schedule_budget: deepest", ScalarType::Int, "int32", num_requests);
  require_float32<kHere>(thresholds, "schedule_budget: thresholds", 1);
  require(max_nodes >= 0, "schedule_budget: max_nodes must not be negative, got ", max_nodes);
  require(num_candidates <= kMaxCandidates, "schedule_budget: scores has ", num_candidates,
          " candidates a request, but ", kMaxCandidates, " can be ranked");
  const int64_t num_depths = thresholds.size(0);
  const int64_t num_kept = max_nodes < num_candidates ? max_nodes : num_candidates;
  const OnDeviceOf device("schedule_budget", scores,
                          {{"tokens", tokens},
                           {"parents", parents},
                           {"depths", depths},
                           {"caps", caps},
                           {"deepest", deepest},
                           {"thresholds", thresholds}});
  Tensor out_tokens = new_ints(scores, {num_requests, num_kept});
  Tensor out_parents = new_ints(scores, {num_requests, num_kept});
  Tensor out_depths = new_ints(scores, {num_requests, num_kept});
  Tensor out_scores = new_tensor(scores, {num_requests, num_kept}, ScalarType::Float);
  Tensor num_nodes = new_ints(scores, {num_requests});
  Tensor num_layers = new_ints(scores, {num_requests});
  Tensor truncated = new_tensor(scores, {num_requests}, ScalarType::Bool);
  Tensor gate_counts = new_tensor(scores, {num_depths, 3}, ScalarType::Long);
  Tensor best = new_tensor(scores, {num_requests, num_depths}, ScalarType::Float);
  Tensor keys = new_tensor(scores, {num_requests, num_kept > 0 ? num_kept : 1}, ScalarType::Long);
  Tensor budget_left = new_tensor(scores, {1}, ScalarType::Long);
  const ScheduleBudget args{table_of(tokens),
                            table_of(parents),
                            table_of(depths),
                            const_data<float>(scores),
                            scores.stride(0),
                            num_requests,
                            num_candidates,
                            const_data<int32_t>(caps),
                            const_data<int32_t>(deepest),
                            const_data<float>(thresholds),
                            num_depths,
                            budget,
                            width,
                            num_kept,
                            data<int32_t>(out_tokens),
                            data<int32_t>(out_parents),
                            data<int32_t>(out_depths),
                            data<float>(out_scores),
                            data<int32_t>(num_nodes),
                            data<int32_t>(num_layers),
                            data<bool>(truncated),
                            data<int64_t>(gate_counts),
                            data<float>(best),
                            data<uint64_t>(keys),
                            data<int64_t>(budget_left)};
  require_launch(schedule_budget(args, device.stream()), "schedule_budget");
  return {out_tokens, out_parents, out_depths, out_scores,
          num_nodes,  num_layers,  truncated,  gate_counts};
}

template <typename Library>
void implement(Library& m) {
  m.impl("pack_trees", TORCH_BOX(&pack_trees_op));
  m.impl("accept_paths", TORCH_BOX(&accept_paths_op));
  m.impl("accept_greedy", TORCH_BOX(&accept_greedy_op));
  m.impl("accept_sampled", TORCH_BOX(&accept_sampled_op));
  m.impl("commit_kv", TORCH_BOX(&commit_kv_op));
  m.impl("tree_part_attention", TORCH_BOX(&tree_part_attention_op));
  m.impl("schedule_budget", TORCH_BOX(&schedule_budget_op));
}

}  // namespace vllm_echo::cuda

#if defined(ECHO_CUDA_ON_CPU)
extern "C" void set_order(int order) { cuda_on_cpu::order = order; }

STABLE_TORCH_LIBRARY(vllm_echo_cuda_on_cpu, m) {
  namespace schemas = vllm_echo::schemas;
  for (const char* schema :
       {schemas::kPackTrees, schemas::kAcceptPaths, schemas::kAcceptGreedy, schemas::kAcceptSampled,
        schemas::kCommitKv, schemas::kTreePartAttention, schemas::kScheduleBudget}) {
    m.def(schema);
  }
}
STABLE_TORCH_LIBRARY_IMPL(vllm_echo_cuda_on_cpu, CPU, m) { vllm_echo::cuda::implement(m); }
#else
STABLE_TORCH_LIBRARY_IMPL(vllm_echo, CUDA, m) { vllm_echo::cuda::implement(m); }
#endif
