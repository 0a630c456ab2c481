#pragma once

#include <cstddef>
#include <cstdint>

#include "trackbed/isa.hpp"

namespace trackbed {

// The inner loops of a batch, over the tokens of one sample.
struct GatherLoops {
  // Widens tokens of the type with this code in index files; they may be unaligned.
  // Requires: an integer type; no overlap. O(count).
  void (*widen)(std::int64_t dtype, const std::byte* tokens, std::size_t count, std::int64_t* target);

  // Writes the loss mask: 0 where a label is `pad` or, if `is_masked`, its token is `masked`, else 1. Then replaces
  // `pad` by 0 among tokens and labels. O(count).
  void (*mask)(std::int64_t* tokens, std::int64_t* labels, std::size_t count, std::int64_t pad, std::int64_t masked,
               bool is_masked, float* mask);

  // Fills the mask with 1. O(count).
  void (*keep_all)(std::size_t count, float* mask);

  // Writes 0, 1, 2 and so on. O(count).
  void (*count_up)(std::int64_t* numbers, std::size_t count);

  // Index of the first `wanted`, or count. O(count).
  std::size_t (*find)(const std::int64_t* numbers, std::size_t count, std::int64_t wanted);
};

// Implementation for `level`; levels not in this build fall back to the baseline.
GatherLoops gather_loops_at(Isa level);

}  // namespace trackbed
