// SPDX-License-Identifier: Apache-2.0
// Malformed trees: cycles, wild parents, huge counts. Whatever the tables hold, packing reports a
// broken node or gives a tree, a walk ends within its rows, and nothing is read or written out of
// bounds: every table is an allocation of just its size, and the sanitizers look on.
//
// An entry for libFuzzer. Without it (`make fuzz`), main() feeds it random inputs.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "../include/accept_paths.h"
#include "../include/next_frontier.h"
#include "../include/pack_trees.h"
#include "../include/rank_trees.h"
#include "../include/read_trees.h"

namespace vllm_echo {
namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

// What the inputs reached: a fuzzer that never packs or accepts shows nothing.
struct Found {
  int64_t broken = 0;
  int64_t packed = 0;
  int64_t accepted = 0;
} found;

// Numbers from the fuzzer's bytes; zeros when they are used up.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  int64_t below(int64_t limit) { return static_cast<int64_t>(byte() | byte() << 8) % limit; }

  // Mostly small, now and then anything.
  int32_t number() {
    const uint32_t kind = byte();
    if (kind < 200) return static_cast<int32_t>(kind % 12) - 2;
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) value = value << 8 | byte();
    return static_cast<int32_t>(value);
  }

  std::vector<int32_t> numbers(int64_t count) {
    std::vector<int32_t> values(count);
    for (int32_t& value : values) value = number();
    return values;
  }

  // Of nodes, or, with their root, of rows: sound in most tables, otherwise anything now and then.
  std::vector<int32_t> parents(int64_t count) {
    const bool sound = below(4) > 0;
    std::vector<int32_t> values(count);
    for (int64_t i = 0; i < count; ++i) {
      const bool wild = !sound && below(count) == 0;
      values[i] = wild ? number() : static_cast<int32_t>(below(i + 1)) - 1;
    }
    return values;
  }

 private:
  uint32_t byte() { return at_ < size_ ? data_[at_++] : 0; }

  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
};

void check_packed(const TreeToPack& tree) {
  for (int64_t row = 1; row <= tree.num_nodes; ++row) {
    const int64_t parent = tree.out_parents[row];
    require(0 <= parent && parent < row, "a parent that is not before its row");
    uint64_t others = 0;
    for (int64_t word = 0; word < tree.num_words; ++word) {
      const uint64_t own = word == row / kMaskWordBits ? uint64_t{1} << row % kMaskWordBits : 0;
      const uint64_t bits = tree.ancestors[row * tree.num_words + word];
      others |= (bits & ~own) ^ tree.ancestors[parent * tree.num_words + word];
      require((bits & own) == own, "a row that does not see itself");
    }
    require(others == 0, "ancestors that are not the parent's");
  }
}

void fuzz_packing(Input& input) {
  const int64_t num_nodes = input.below(260);
  const int64_t num_words = num_nodes / kMaskWordBits + 1;
  const std::vector<int32_t> tokens = input.numbers(num_nodes);
  const std::vector<int32_t> parents = input.parents(num_nodes);
  const std::vector<int32_t> depths = input.numbers(num_nodes);
  std::vector<int32_t> out_tokens(num_nodes + 1), out_parents(num_nodes + 1),
      out_depths(num_nodes + 1);
  std::vector<uint64_t> ancestors((num_nodes + 1) * num_words);
  const TreeToPack tree{tokens.data(),      parents.data(),    depths.data(),
                        num_nodes,          num_words,         out_tokens.data(),
                        out_parents.data(), out_depths.data(), ancestors.data()};
  const int64_t broken = pack_tree(tree);
  require(broken >= -1 && broken < num_nodes, "a broken node that does not exist");
  found.broken += broken >= 0;
  if (broken >= 0) {
    require(parents[broken] < -1 || parents[broken] >= broken, "a sound node called broken");
  } else {
    check_packed(tree);
    found.packed += num_nodes > 0;
  }
}

void fuzz_walking(Input& input) {
  const int64_t num_rows = input.below(260);
  const int64_t capacity = input.below(260);
  const std::vector<int32_t> tokens = input.numbers(num_rows);
  const std::vector<int32_t> parents = input.parents(num_rows);
  const std::vector<int32_t> targets = input.numbers(num_rows);
  std::vector<int32_t> out(capacity + 1, -1), rows(capacity, -1);
  const auto target = [&](int64_t row) {
    require(row >= 0 && row < num_rows, "a row outside the tree was visited");
    return NextToken{targets[row], targets[row] % 7 != 3};
  };
  const GreedyWalk<decltype(target)> walk{target,   tokens.data(), parents.data(), num_rows,
                                          capacity, out.data(),    rows.data()};
  const int64_t accepted = accept_path(walk);
  require(accepted >= 0 && accepted <= capacity, "more nodes accepted than there is room for");
  int64_t above = 0;
  for (int64_t k = 0; k < accepted; ++k) {
    require(rows[k] > above && rows[k] < num_rows, "a path that does not ascend");
    require(parents[rows[k]] == above && tokens[rows[k]] == targets[above], "a step to no child");
    require(targets[above] % 7 != 3, "a step from an invalid row");
    above = rows[k];
  }
  found.accepted += accepted;
  require(num_rows == 0 || out[accepted] == targets[above], "another last token");
}

void fuzz_reading(Input& input) {
  const int64_t width = input.below(40);
  const std::vector<int32_t> tokens = input.numbers(width);
  const std::vector<int32_t> parents = input.numbers(width);
  const std::vector<int32_t> depths = input.numbers(width);
  const std::vector<int32_t> scheduled = input.numbers(width);
  std::vector<int32_t> out_parents(width), out_depths(width);
  const TreeToRead tree{tokens.data(),  parents.data(),     depths.data(),
                        input.number(), scheduled.data(),   input.number(),
                        width,          out_parents.data(), out_depths.data()};
  read_tree(tree);
}

void fuzz_ranking(Input& input) {
  const int64_t count = 1 + input.below(60);
  const int64_t kept = input.below(count + 1);
  const std::vector<int32_t> tokens = input.numbers(count);
  const std::vector<int32_t> parents = input.parents(count);
  const std::vector<int32_t> depths = input.numbers(count);
  std::vector<uint64_t> keys(count);
  for (int64_t c = 0; c < count; ++c) keys[c] = rank_key(-static_cast<float>(input.below(9)), c);
  for (int64_t i = count - 1; i > 0; --i) std::swap(keys[i], keys[input.below(i + 1)]);
  std::vector<int32_t> places(count), out_tokens(kept), out_parents(kept), out_depths(kept);
  const TreeToRank tree{
      keys.data(), tokens.data(), parents.data(),    depths.data(),      count,
      kept,        places.data(), out_tokens.data(), out_parents.data(), out_depths.data()};
  const int64_t broken = rank_tree(tree);
  require(broken >= -1 && broken < count, "a broken candidate that does not exist");
  for (int64_t place = 0; broken < 0 && place < kept; ++place) {
    require(out_parents[place] >= -1 && out_parents[place] < count, "a parent without a place");
  }
}

}  // namespace
}  // namespace vllm_echo

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  vllm_echo::Input input(data, size);
  switch (input.below(4)) {
    case 0:
      vllm_echo::fuzz_packing(input);
      break;
    case 1:
      vllm_echo::fuzz_walking(input);
      break;
    case 2:
      vllm_echo::fuzz_reading(input);
      break;
    default:
      vllm_echo::fuzz_ranking(input);
  }
  return 0;
}

#if !defined(ECHO_LIBFUZZER)
// Random bytes for as many seconds as the first argument says, from the seed of the second.
int main(int count, char** arguments) {
  const double seconds = count > 1 ? std::atof(arguments[1]) : 10.0;
  const uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 0;
  std::mt19937_64 random(seed);
  const auto start = std::chrono::steady_clock::now();
  int64_t inputs = 0;
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() <
         seconds) {
    for (int i = 0; i < 1000; ++i, ++inputs) {
      std::vector<uint8_t> data(random() % 2048);
      for (uint8_t& byte : data) byte = static_cast<uint8_t>(random());
      LLVMFuzzerTestOneInput(data.data(), data.size());
    }
  }
  std::printf(
      "%lld inputs from seed %llu in %.0f s: %lld trees packed, %lld refused, %lld nodes "
      "accepted\n",
      static_cast<long long>(inputs), static_cast<unsigned long long>(seed), seconds,
      static_cast<long long>(vllm_echo::found.packed),
      static_cast<long long>(vllm_echo::found.broken),
      static_cast<long long>(vllm_echo::found.accepted));
  const bool reached =
      vllm_echo::found.packed > 0 && vllm_echo::found.broken > 0 && vllm_echo::found.accepted > 0;
  return reached ? 0 : 1;
}
#endif
