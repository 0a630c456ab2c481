#pragma once

#include <cstddef>
#include <cstdint>

#include "trackbed/isa.hpp"

namespace trackbed {

// The inner loops of a batch: over the tokens of one sample.
struct GatherLoops {
  // Widens tokens of the type that an index file names by this code; they may lie at any address.
  // Requires: an integer type; no overlap. O(count).
  void (*widen)(std::int64_t dtype, const std::byte* tokens, std::size_t count, std::int64_t* target);

  // 1 where a label counts: where it is not `pad` and its token not `masked`, if anything `is_masked`; else 0. Then
  // sets what is `pad` among tokens and labels to 0. O(count).
  void (*mask)(std::int64_t* tokens, std::int64_t* labels, std::size_t count, std::int64_t pad, std::int64_t masked,
               bool is_masked, float* mask);

  // 1 everywhere. O(count).
  void (*keep_all)(std::size_t count, float* mask);

  // 0, 1, 2 and so on. O(count).
  void (*count_up)(std::int64_t* numbers, std::size_t count);

  // Where `wanted` stands first, or count. O(count).
  std::size_t (*find)(const std::int64_t* numbers, std::size_t count, std::int64_t wanted);
};

// The implementation for `level`; a level that this build lacks falls back to the baseline.
GatherLoops gather_loops_at(Isa level);

}  // namespace trackbed
