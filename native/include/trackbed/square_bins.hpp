#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "trackbed/poll.hpp"

namespace trackbed {

// Sum of the squares of float32 numbers, exactly: for each exponent, the sum of the squares of the mantissas.
// A number with the exponent bits e has the square mantissa^2 * 2^(2 max(e, 1) - 300), where the mantissa is an integer
// below 2^24. Infinities and NaNs are counted at exponent 255.
struct SquareBins {
  std::array<std::uint64_t, 256> low{};
  std::array<std::uint64_t, 256> high{};  // multiples of 2^64
};

// Adds the squares of numbers to `bins`. The result does not depend on their order. Element is float32's bits
// (std::uint32_t) or bfloat16's (std::uint16_t). O(N).
template <class Element>
void add_squares(std::span<const Element> numbers, SquareBins& bins, int num_threads, Poll& poll);

}  // namespace trackbed
