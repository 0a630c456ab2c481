#pragma once

#include <cstddef>
#include <cstdint>

#include "trackbed/isa.hpp"
#include "trackbed/mersenne_twister.hpp"

namespace trackbed {

// Targets of a Fisher-Yates shuffle as drawn by NumPy's RandomState: for each element from `last` down, a number in
// [0, element] by masked rejection.
struct TargetDraws {
  // Draws 32 bits per try, until the twister's words are used up or all elements above 0 have a target. Returns the
  // number of targets.
  // Requires: last in [1, 2**32), and space in `targets` for kWords + 16 numbers; those beyond the returned count are
  // undefined.
  std::size_t (*narrow)(MersenneTwister& twister, std::uint64_t last, std::uint32_t* targets);

  // Draws 64 bits per try, for `count` elements.
  // Requires: last - count >= 2**32 - 1.
  void (*wide)(MersenneTwister& twister, std::uint64_t last, std::uint64_t* targets, std::size_t count);

  // Regenerates all words, so that the next one to draw is the first.
  void (*regenerate)(MersenneTwister& twister);
};

// Implementation for `level`; levels not in this build fall back to the baseline.
TargetDraws target_draws_at(Isa level);

}  // namespace trackbed
