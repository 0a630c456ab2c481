#pragma once

#include <cstddef>
#include <cstdint>

#include "trackbed/isa.hpp"

namespace trackbed {

// The inner loops of a blend. The error of an entry at a step is its distance behind its share: weight * step - count
// in doubles, with product and difference rounded separately. As weights are at least 0, it never decreases from step
// to step until the entry is drawn, which increments its count.
struct BlendLoops {
  // Elements of padding after the last entry of each array, with weight 0 and an infinite count.
  static constexpr std::size_t kPadding = 64;

  // Index of the first entry with the largest error at `step`. Weights may be negative, and need no padding.
  // Requires: size >= 1, no NaN. O(size).
  std::size_t (*largest_error)(const double* weights, const double* counts, std::size_t size, double step);

  // Copies the entries whose error at `step` is at least `threshold`, in order: weights, counts, and their indices to
  // `at`. Returns their number.
  // Requires: padded input and output arrays of equal capacity; a finite threshold. O(size).
  std::size_t (*sieve)(const double* weights, const double* counts, std::size_t size, double step, double threshold,
                       double* sieved_weights, double* sieved_counts, std::int32_t* at);

  // Draws the first entry with the largest error at each of `num_steps` steps from `step` on; stops before a step whose
  // largest error is below `threshold`. Writes the entries to `drawn` and their new counts to `counts`, and lowers
  // `lowest` to the smallest of the largest errors. Returns the number of steps drawn.
  // Requires: size >= 1, padded arrays. O(size) per step; up to 64 entries are kept in registers if these are wide.
  std::size_t (*draw)(const double* weights, double* counts, std::size_t size, double step, std::size_t num_steps,
                      double threshold, std::uint32_t* drawn, double* lowest);
};

// Implementation for `level`; levels not in this build fall back to the baseline.
BlendLoops blend_loops_at(Isa level);

}  // namespace trackbed
