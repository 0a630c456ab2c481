#pragma once

#include <cstddef>
#include <cstdint>

#include "trackbed/isa.hpp"
#include "trackbed/number.hpp"
#include "trackbed/poll.hpp"

namespace trackbed {

// Elements [start, stop) of the buffers of all ranks, as summed by one rank.
struct RankSum {
  std::byte* const* buffers;  // of each rank, from their first element
  std::size_t num_ranks;
  Number number;
  std::size_t start;
  std::size_t stop;
  double factor;      // each number is multiplied by it, and the product rounded to its type, before the sum
  double divisor;     // the sum is divided by it
  std::size_t owner;  // rank whose buffer gets the sum, while the others keep their products; all ranks if too large
};

// Sums the buffers in place, in one pass; numbers of 16 bits are added in float32. Of n ranks with h = ceil(n / 2),
// rank r adds rank r + h, then n = h, until one is left: the order is the same for every element, and the result is
// rounded once. Requires: at least one buffer, start <= stop. O(ranks * elements), bound by memory bandwidth.
void sum_ranks(const RankSum& sum, Isa level, int num_threads, Poll& poll);

// The same on one thread and without a poll, for one instruction level. `rows` has space for ceil(n / 2) rows of
// kSumRowBytes.
using SumLoop = void (*)(const RankSum& sum, std::size_t start, std::size_t stop, std::byte* rows);
inline constexpr std::size_t kSumRowBytes = 2048;
SumLoop sum_loop_at(Isa level);

}  // namespace trackbed
