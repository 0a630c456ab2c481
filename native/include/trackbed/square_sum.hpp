#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "trackbed/isa.hpp"
#include "trackbed/number.hpp"
#include "trackbed/poll.hpp"

namespace trackbed {

// A sum of squares as an integer in units of 2^kSquareUnit: kSquareDigits digits of 32 bits, lowest first, then the
// number of NaNs and the number of infinities. The digits hold the sum of 2^80 squares.
inline constexpr int kSquareUnit = -300;
inline constexpr std::size_t kSquareDigits = 20;
inline constexpr std::size_t kSquareSumSize = kSquareDigits + 2;

// Exact sum of the squares of `count` numbers, independent of their order. The square of a float64 is rounded to
// float64 and then to a multiple of 2^-300, ties to even, and a float64 from 2^128 on counts as infinite. Each digit is
// in [0, 2^32), and zero if there is a NaN or an infinity. Requires: `sum` has kSquareSumSize elements. O(count), in
// one pass.
void square_sum(const std::byte* numbers, Number type, std::size_t count, std::span<std::int64_t> sum, Isa level,
                int num_threads, Poll& poll);

// The same for at most kSquareTask numbers, on one thread and without a poll, for one instruction level. Adds to `sum`
// without carrying: each digit grows by less than 2^48. Numbers that are not finite are only counted.
using SquareLoop = void (*)(const std::byte* numbers, Number type, std::size_t count, std::int64_t* sum);
inline constexpr std::size_t kSquareTask = std::size_t{1} << 18;
SquareLoop square_loop_at(Isa level);

}  // namespace trackbed
