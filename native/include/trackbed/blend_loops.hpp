#pragma once

#include <cstddef>
#include <cstdint>

#include "trackbed/isa.hpp"

namespace trackbed {

// The inner loops of a blend. The error of an entry at a step is weight * step - count in doubles, product and
// difference rounded apart: how far it is behind its share. It only grows with the step, as weights are at least 0,
// until the entry is drawn and its count grows by 1.
struct BlendLoops {
  // Arrays of entries have so much room after the last one, and hold weight 0 and an infinite count there.
  static constexpr std::size_t kPadding = 64;

  // The first entry whose error at `step` is largest. Weights may be negative, and need no padding.
  // Requires: size >= 1, no NaN. O(size).
  std::size_t (*largest_error)(const double* weights, const double* counts, std::size_t size, double step);

  // The entries whose error at `step` is at least `threshold`, in their order: weights, counts, and their numbers
  // in `at`. Returns how many there are.
  // Requires: padded arrays of equal room in and out; a finite threshold. O(size).
  std::size_t (*sieve)(const double* weights, const double* counts, std::size_t size, double step, double threshold,
                       double* sieved_weights, double* sieved_counts, std::int32_t* at);

  // Draws the first entry of the largest error at `step`, and again at the steps after it, `num_steps` in all, or
  // fewer: it stops before one whose largest error is below `threshold`. Notes the entry in `drawn`, its new count in
  // `counts`, and in `lowest` the smallest largest error, if that is smaller. Returns the number of steps drawn.
  // Requires: size >= 1, padded arrays. O(size) a step; up to 64 entries it works in registers where they are wide.
  std::size_t (*draw)(const double* weights, double* counts, std::size_t size, double step, std::size_t num_steps,
                      double threshold, std::uint32_t* drawn, double* lowest);
};

// The implementation for `level`; a level that this build lacks falls back to the baseline.
BlendLoops blend_loops_at(Isa level);

}  // namespace trackbed
