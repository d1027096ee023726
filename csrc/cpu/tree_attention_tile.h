// SPDX-License-Identifier: Apache-2.0
// One tile of tree attention on a CPU, for the instruction set of the including file (see vec.h).
//
// A tile holds M = rows * heads_per_kv query vectors of one request and one KV head. The context is
// walked in steps of kSlotsPerStep slots with an online softmax; every K and V block is read once
// for all M vectors. Then the slots of the tree: scores are computed for each group of slots that
// some row sees, and each row keeps only those its mask names. A slot outside a row's mask never
// enters its arithmetic, so stale memory (NaN) in unused slots is harmless.
//
// Each row's sums run in slot order, whatever the tile: results depend neither on the batch nor on
// the number of threads.
#pragma once

#include "../include/tree_attention.h"
#include "../include/tree_mask.h"
#include "attention_passes.h"

namespace vllm_echo::ECHO_SIMD_LEVEL {
namespace {

constexpr int64_t kSlotGroup =
    16;  // block sizes are multiples of this, so a group never straddles blocks
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

constexpr int64_t kValueRowFloats = kSlotsPerStep * static_cast<int64_t>(sizeof(void*)) / 4;

static_assert(kSlotGroup % kLanes == 0);

// Everything a tile keeps between steps; points into the caller's scratch.
template <typename T>
struct TileState {
  const TreeAttentionParams& p;
  const AttentionTile& tile;
  BlockRow blocks;
  int64_t num_queries;   // M; query m belongs to row m / heads_per_kv of the tile
  float* query;          // [M, head_dim], as store_query leaves them
  float* acc;            // [M, head_dim] unnormalised output
  float* scores;         // [M, kSlotsPerStep] scores of the step, then probabilities
  float* row_max;        // [M] running maximum
  float* row_sum;        // [M, kLanes] running sums of exponentials, one a lane
  float* decay;          // [M] factor for acc in this step
  const T** value_rows;  // [kSlotsPerStep] the step's value vectors
};

template <typename T>
TileState<T> make_state(const TreeAttentionParams& p, const AttentionTile& tile, float* scratch) {
  const int64_t m = tile.num_rows * p.heads_per_kv;
  TileState<T> s{
      p,       tile,   block_row(p, tile.request), m, nullptr, nullptr, nullptr, nullptr, nullptr,
      nullptr, nullptr};
  s.value_rows = reinterpret_cast<const T**>(scratch);
  s.scores = scratch + kValueRowFloats;
  s.query = s.scores + m * kSlotsPerStep;
  s.acc = s.query + m * p.head_dim;
  s.row_sum = s.acc + m * p.head_dim;
  s.row_max = s.row_sum + m * kLanes;
  s.decay = s.row_max + m;
  return s;
}

template <typename T>
void load_queries(const TileState<T>& s) {
  const TreeAttentionParams& p = s.p;
  for (int64_t m = 0; m < s.num_queries; ++m) {
    const int64_t row = s.tile.first_row + m / p.heads_per_kv;
    const int64_t head = s.tile.kv_head * p.heads_per_kv + m % p.heads_per_kv;
    const T* from =
        static_cast<const T*>(p.query) + row * p.query_row_stride + head * p.query_head_stride;
    store_query(from, p.head_dim, p.scale, s.query + m * p.head_dim);
    for (int64_t d = 0; d < p.head_dim; d += kLanes) store(s.acc + m * p.head_dim + d, Vec{});
    s.row_max[m] = kMinusInf;
    store(s.row_sum + m * kLanes, Vec{});
  }
}

// Scores of slots [begin, end) of one block for all queries, into columns that start at `column`.
// Whole slot groups: a score past the end of what is valid is computed from memory of the same
// block, and ignored by the caller.
template <typename T>
void score_slots(const TileState<T>& s, int64_t begin, int64_t end, int64_t column) {
  const T* keys = reinterpret_cast<const T*>(s.p.keys.data) +
                  slot_offset(s.p.keys, s.blocks, s.tile.kv_head, begin);
  const int64_t head_dim = s.p.head_dim;
  int64_t vecs = (end - begin + kSlotGroup - 1) / kSlotGroup * (kSlotGroup / kLanes);
  for (int64_t width; vecs > 0; vecs -= width, keys += width * kLanes, column += width * kLanes) {
    width = pass_width(vecs);
    for (int64_t m = 0; m < s.num_queries; m += kQueriesPerPass) {
      const int64_t n = s.num_queries - m < kQueriesPerPass ? s.num_queries - m : kQueriesPerPass;
      const float* query = s.query + m * head_dim;
      float* scores = s.scores + m * kSlotsPerStep + column;
      if (width == kVecsPerPass) {
        score_queries<T, kVecsPerPass>(n, query, head_dim, keys, s.p.keys.dim_stride, s.p.scale,
                                       scores);
      } else if (width == 2) {
        score_queries<T, 2>(n, query, head_dim, keys, s.p.keys.dim_stride, s.p.scale, scores);
      } else {
        score_queries<T, 1>(n, query, head_dim, keys, s.p.keys.dim_stride, s.p.scale, scores);
      }
    }
  }
}

// Adds the step's values to queries [first, first + count); scores hold probabilities.
template <typename T>
void add_values(const TileState<T>& s, int64_t first, int64_t count, int64_t num_slots) {
  const int64_t head_dim = s.p.head_dim;
  for (int64_t dim = 0, width; dim < head_dim; dim += width * kLanes) {
    width = pass_width((head_dim - dim) / kLanes);
    for (int64_t m = first; m < first + count; m += kQueriesPerPass) {
      const int64_t n = first + count - m < kQueriesPerPass ? first + count - m : kQueriesPerPass;
      const float* probs = s.scores + m * kSlotsPerStep;
      float* acc = s.acc + m * head_dim;
      if (width == kVecsPerPass) {
        value_queries<T, kVecsPerPass>(n, probs, s.value_rows, num_slots, dim, s.decay + m,
                                       head_dim, acc);
      } else if (width == 2) {
        value_queries<T, 2>(n, probs, s.value_rows, num_slots, dim, s.decay + m, head_dim, acc);
      } else {
        value_queries<T, 1>(n, probs, s.value_rows, num_slots, dim, s.decay + m, head_dim, acc);
      }
    }
  }
}

// Caps the scores if asked to, and fills the last vector with -inf. Returns the padded length.
template <typename T>
int64_t finish_scores(const TileState<T>& s, float* scores, int64_t num_slots) {
  const int64_t padded = (num_slots + kLanes - 1) / kLanes * kLanes;
  const float cap = s.p.softcap;
  if (cap > 0.0f) {
    for (int64_t i = 0; i < padded; i += kLanes)
      store(scores + i, tanh(load(scores + i) / cap) * cap);
  }
  for (int64_t i = num_slots; i < padded; ++i) scores[i] = kMinusInf;
  return padded;
}

// Turns the first `num_slots` scores of queries [first, first + count) into probabilities relative
// to the running maximum. Sums stay per lane until the end (store_outputs adds them up): one
// reduction less in every step.
template <typename T>
void softmax_step(const TileState<T>& s, int64_t first, int64_t count, int64_t num_slots) {
  for (int64_t m = first; m < first + count; ++m) {
    float* scores = s.scores + m * kSlotsPerStep;
    const int64_t padded = finish_scores(s, scores, num_slots);
    Vec largest = load(scores);
    for (int64_t i = kLanes; i < padded; i += kLanes) largest = max(load(scores + i), largest);
    const float step_max = reduce_max(largest);
    const float old_max = s.row_max[m];
    const float new_max = step_max > old_max ? step_max : old_max;
    const Vec decay = exp_nonpositive(broadcast(old_max - new_max));
    Vec sum = load(s.row_sum + m * kLanes) * decay;
    for (int64_t i = 0; i < padded; i += kLanes) {
      const Vec prob = exp_nonpositive(load(scores + i) - new_max);
      store(scores + i, prob);
      sum += prob;
    }
    store(s.row_sum + m * kLanes, sum);
    s.row_max[m] = new_max;
    s.decay[m] = decay[0];
  }
}

template <typename T>
const T* value_row(const TileState<T>& s, int64_t slot) {
  return reinterpret_cast<const T*>(s.p.values.data) +
         slot_offset(s.p.values, s.blocks, s.tile.kv_head, slot);
}

template <typename T>
void attend_to_context(const TileState<T>& s) {
  const int64_t context_len = s.p.context_lens[s.tile.request];
  for (int64_t begin = 0; begin < context_len; begin += kSlotsPerStep) {
    const int64_t end = begin + kSlotsPerStep < context_len ? begin + kSlotsPerStep : context_len;
    for (int64_t slot = begin, next; slot < end; slot = next) {
      next = (slot / s.p.block_size + 1) * s.p.block_size;
      next = next < end ? next : end;
      score_slots(s, slot, next, slot - begin);
      const T* value = value_row(s, slot);
      for (int64_t i = slot; i < next; ++i, value += s.p.values.slot_stride)
        s.value_rows[i - begin] = value;
    }
    softmax_step(s, 0, s.num_queries, end - begin);
    add_values(s, 0, s.num_queries, end - begin);
  }
}

// The tree's slots in a window of kSlotsPerStep slots.
struct TreeWindow {
  int64_t begin;      // first slot, a multiple of kSlotGroup (it may lie before the tree)
  int64_t first_bit;  // mask bits of the window: [first_bit, end_bit)
  int64_t end_bit;
};

template <typename T>
const uint64_t* mask_row(const TileState<T>& s, int64_t row) {
  return s.p.mask + (s.tile.first_row + row) * s.p.mask_stride;
}

// Calls visit(slot offset in the window) for each slot of the window that a row of the tile sees.
template <typename T, typename Visit>
ECHO_INLINE void for_each_visible(const TileState<T>& s, const TreeWindow& w, int64_t row,
                                  Visit visit) {
  const int64_t shift = s.p.context_lens[s.tile.request] - w.begin;
  for (int64_t word = w.first_bit / kMaskWordBits; word * kMaskWordBits < w.end_bit; ++word) {
    uint64_t bits = mask_word_in_range(mask_row(s, row), word, w.first_bit, w.end_bit);
    for (; bits != 0; bits &= bits - 1) visit(shift + word * kMaskWordBits + __builtin_ctzll(bits));
  }
}

// Scores of every slot group of the window that some row of the tile sees, in runs within a block.
template <typename T>
void score_window(const TileState<T>& s, const TreeWindow& w) {
  constexpr int64_t kGroups = kSlotsPerStep / kSlotGroup;
  bool seen[kGroups] = {};
  for (int64_t row = 0; row < s.tile.num_rows; ++row) {
    for_each_visible(s, w, row, [&](int64_t i) { seen[i / kSlotGroup] = true; });
  }
  for (int64_t group = 0; group < kGroups; ++group) {
    if (!seen[group]) continue;
    int64_t end = group + 1;
    while (end < kGroups && seen[end] && (w.begin + end * kSlotGroup) % s.p.block_size != 0) ++end;
    score_slots(s, w.begin + group * kSlotGroup, w.begin + end * kSlotGroup, group * kSlotGroup);
    group = end - 1;
  }
}

// Keeps the scores a row sees, packed to the front, and attends to them.
template <typename T>
void attend_row(const TileState<T>& s, const TreeWindow& w, int64_t row) {
  const int64_t first = row * s.p.heads_per_kv;
  int64_t count = 0;
  for_each_visible(s, w, row, [&](int64_t i) {
    for (int64_t m = first; m < first + s.p.heads_per_kv; ++m) {
      s.scores[m * kSlotsPerStep + count] =
          s.scores[m * kSlotsPerStep + i];  // i >= count: never overtakes
    }
    s.value_rows[count++] = value_row(s, w.begin + i);
  });
  if (count == 0) return;
  softmax_step(s, first, s.p.heads_per_kv, count);
  add_values(s, first, s.p.heads_per_kv, count);
}

template <typename T>
void attend_to_tree(const TileState<T>& s) {
  const int64_t context_len = s.p.context_lens[s.tile.request];
  const int64_t num_bits = s.p.mask_words * kMaskWordBits;
  for (int64_t begin = context_len / kSlotGroup * kSlotGroup; begin < context_len + num_bits;
       begin += kSlotsPerStep) {
    const int64_t first_bit = begin > context_len ? begin - context_len : 0;
    const int64_t end_bit = begin + kSlotsPerStep - context_len;
    const TreeWindow window{begin, first_bit, end_bit < num_bits ? end_bit : num_bits};
    score_window(s, window);
    for (int64_t row = 0; row < s.tile.num_rows; ++row) attend_row(s, window, row);
  }
}

template <typename T>
void store_outputs(const TileState<T>& s) {
  const TreeAttentionParams& p = s.p;
  for (int64_t m = 0; m < s.num_queries; ++m) {
    const int64_t row = s.tile.first_row + m / p.heads_per_kv;
    const int64_t head = s.tile.kv_head * p.heads_per_kv + m % p.heads_per_kv;
    T* to = static_cast<T*>(p.out) + row * p.out_row_stride + head * p.out_head_stride;
    const float sum = reduce_sum(load(s.row_sum + m * kLanes));
    const float norm = sum == 0.0f ? 0.0f : 1.0f / sum;  // 0: the row saw no slot
    for (int64_t d = 0; d < p.head_dim; ++d) store_lane(to + d, s.acc[m * p.head_dim + d] * norm);
  }
}

template <typename T>
void run_tile(const TreeAttentionParams& p, const AttentionTile& tile, float* scratch) {
  const TileState<T> state = make_state<T>(p, tile, scratch);
  load_queries(state);
  attend_to_context(state);
  attend_to_tree(state);
  store_outputs(state);
}

void tree_attention_tile(const TreeAttentionParams& p, const AttentionTile& tile, FloatType type,
                         float* scratch) {
  switch (type) {
    case FloatType::kFloat32:
      return run_tile<float>(p, tile, scratch);
    case FloatType::kBfloat16:
      return run_tile<Bf16>(p, tile, scratch);
    case FloatType::kFloat16:
      return run_tile<Fp16>(p, tile, scratch);
  }
}

}  // namespace
}  // namespace vllm_echo::ECHO_SIMD_LEVEL
