// SPDX-License-Identifier: Apache-2.0
// Every operator of vllm-echo: its schema, and what implements it. Contracts are documented in
// vllm_echo/ops/.
//
// Only PyTorch's stable ABI is used, so one build serves every PyTorch from the version in setup.py
// on.
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include "common/schemas.h"
#include "cpu/ops.h"

namespace schemas = vllm_echo::schemas;

STABLE_TORCH_LIBRARY(vllm_echo, m) {
  m.def(
      "tree_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
      "Tensor cu_rows, "
      "Tensor context_lens, Tensor mask, float scale, float softcap, Tensor(a!) out) -> ()");
  m.def(schemas::kCommitKv);
  m.def(schemas::kTreePartAttention);
  m.def(schemas::kAcceptPaths);
  m.def(schemas::kAcceptGreedy);
  m.def(schemas::kAcceptSampled);
  m.def(schemas::kPackTrees);
  m.def(
      "order_trees(Tensor tokens, Tensor parents, Tensor depths, Tensor scores, Tensor caps, "
      "Tensor deepest, Tensor thresholds, int rule, bool width, int max_nodes) -> "
      "(Tensor out_tokens, Tensor out_parents, Tensor out_depths, Tensor keys)");
  m.def(
      "fastest_size(Tensor keys, Tensor added_ms, int num_requests, float plain_ms) -> "
      "Tensor size");
  m.def("admit_nodes(Tensor keys, int budget) -> Tensor num_nodes");
  m.def(
      "score_children(Tensor log_probs, Tensor requests, Tensor sampled, Tensor curves) -> "
      "Tensor scores");
  m.def(
      "append_layer(Tensor(a!) tokens, Tensor(b!) parents, Tensor(c!) scores, Tensor requests, "
      "Tensor child_tokens, Tensor child_scores, Tensor chain_only, Tensor? parent_scores, "
      "Tensor? parent_columns, int first_parent_column) -> Tensor best");
  m.def(
      "grant_layer(Tensor best, Tensor active, Tensor caps, Tensor deepest, Tensor(a!) num_layers, "
      "Tensor(b!) truncated, int depth, float? threshold, int budget) -> (Tensor deeper, "
      "Tensor counts)");
  m.def(
      "expect_gain(Tensor best, Tensor active, Tensor deepest, Tensor sampled, Tensor best_child, "
      "int depth, float price, float ms_per_token, float request_ms, float layer_ms) -> "
      "Tensor deeper");
  m.def(schemas::kScheduleBudget);
  m.def(
      "next_frontier(Tensor tokens, Tensor scores, Tensor active, Tensor own_bits, int top_k, "
      "Tensor? previous_requests, Tensor? ancestors) -> (Tensor requests, Tensor out_tokens, "
      "Tensor parent_rows, Tensor out_ancestors, Tensor columns, Tensor out_scores)");
  m.def(
      "read_trees(Tensor tokens, Tensor parents, Tensor depths, Tensor num_nodes, Tensor slots, "
      "Tensor scheduled, Tensor num_scheduled) -> (Tensor out_parents, Tensor out_depths)");
  m.def("build_info() -> str");
  m.def("set_simd_level(str name) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_echo, CPU, m) {
  m.impl("tree_attention", TORCH_BOX(&vllm_echo::cpu::tree_attention));
  m.impl("commit_kv", TORCH_BOX(&vllm_echo::cpu::commit_kv));
  m.impl("pack_trees", TORCH_BOX(&vllm_echo::cpu::pack_trees));
  m.impl("accept_paths", TORCH_BOX(&vllm_echo::cpu::accept_paths));
  m.impl("accept_greedy", TORCH_BOX(&vllm_echo::cpu::accept_greedy));
  m.impl("accept_sampled", TORCH_BOX(&vllm_echo::cpu::accept_sampled));
  m.impl("order_trees", TORCH_BOX(&vllm_echo::cpu::order_trees));
  m.impl("fastest_size", TORCH_BOX(&vllm_echo::cpu::fastest_size));
  m.impl("admit_nodes", TORCH_BOX(&vllm_echo::cpu::admit_nodes));
  m.impl("score_children", TORCH_BOX(&vllm_echo::cpu::score_children));
  m.impl("append_layer", TORCH_BOX(&vllm_echo::cpu::append_layer));
  m.impl("grant_layer", TORCH_BOX(&vllm_echo::cpu::grant_layer));
  m.impl("expect_gain", TORCH_BOX(&vllm_echo::cpu::expect_gain));
  m.impl("next_frontier", TORCH_BOX(&vllm_echo::cpu::next_frontier));
  m.impl("read_trees", TORCH_BOX(&vllm_echo::cpu::read_trees));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_echo, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&vllm_echo::cpu::build_info));
  m.impl("set_simd_level", TORCH_BOX(&vllm_echo::cpu::set_simd_level));
}

// Importing vllm_echo._C loads this library, whose static initialisers register the operators
// above.
PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
