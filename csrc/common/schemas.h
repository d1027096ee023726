// SPDX-License-Identifier: Apache-2.0
// Schemas of the operators that have a CUDA implementation.
#pragma once

namespace vllm_echo::schemas {

constexpr const char* kCommitKv =
    "commit_kv(Tensor(a!)[] kv_caches, Tensor block_table, Tensor root_slots, Tensor path_rows, "
    "Tensor path_lens) -> ()";

constexpr const char* kAcceptPaths =
    "accept_paths(Tensor target_tokens, Tensor cu_rows, Tensor tokens, Tensor parents, "
    "int? max_nodes=None) -> "
    "(Tensor out_tokens, Tensor path_rows, Tensor num_accepted)";

constexpr const char* kAcceptGreedy =
    "accept_greedy(Tensor logits, Tensor cu_rows, Tensor tokens, Tensor parents, "
    "int? max_nodes=None) -> "
    "(Tensor out_tokens, Tensor path_rows, Tensor num_accepted)";

constexpr const char* kAcceptSampled =
    "accept_sampled(Tensor logits, Tensor cu_rows, Tensor tokens, Tensor parents, Tensor depths, "
    "Tensor temperatures, Tensor seeds, Tensor root_positions, int? max_nodes=None) -> "
    "(Tensor out_tokens, Tensor path_rows, Tensor num_accepted)";

constexpr const char* kPackTrees =
    "pack_trees(Tensor tokens, Tensor parents, Tensor depths, Tensor num_nodes, "
    "int? max_rows=None) -> "
    "(Tensor cu_rows, Tensor out_tokens, Tensor out_parents, Tensor out_depths, "
    "Tensor ancestors)";

constexpr const char* kScheduleBudget =
    "schedule_budget(Tensor tokens, Tensor parents, Tensor depths, Tensor scores, Tensor caps, "
    "Tensor deepest, Tensor thresholds, int budget, bool width, int max_nodes) -> "
    "(Tensor out_tokens, Tensor out_parents, Tensor out_depths, Tensor out_scores, "
    "Tensor num_nodes, Tensor num_layers, Tensor truncated, Tensor gate_counts)";

constexpr const char* kTreePartAttention =
    "tree_part_attention(Tensor query, Tensor key, Tensor value, Tensor cu_rows, "
    "Tensor ancestors, float scale, float softcap=0.0) -> (Tensor out, Tensor lse)";

}  // namespace vllm_echo::schemas
