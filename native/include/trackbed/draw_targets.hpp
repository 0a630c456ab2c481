#pragma once

#include <cstddef>
#include <cstdint>

#include "trackbed/isa.hpp"
#include "trackbed/mersenne_twister.hpp"

namespace trackbed {

// Targets of a Fisher-Yates shuffle as NumPy's RandomState draws them: for the elements from `last` down, a number in
// [0, element] each, by masked rejection.
struct TargetDraws {
  // Draws 32 bits for each try, until the twister's words are used up or all elements above 0 have a target. Returns
  // how many have, at least 0.
  // Requires: last in [1, 2**32), and room in `targets` for kWords + 16 numbers, of which those from the returned
  // count on mean nothing.
  std::size_t (*narrow)(MersenneTwister& twister, std::uint64_t last, std::uint32_t* targets);

  // Draws 64 bits for each try, for `count` elements.
  // Requires: last - count >= 2**32 - 1.
  void (*wide)(MersenneTwister& twister, std::uint64_t last, std::uint64_t* targets, std::size_t count);
};

// The implementation for `level`; a level that this build lacks falls back to the baseline.
TargetDraws target_draws_at(Isa level);

}  // namespace trackbed
