#pragma once

#include <span>

#include "trackbed/isa.hpp"
#include "trackbed/mersenne_twister.hpp"
#include "trackbed/poll.hpp"

namespace trackbed {

// Shuffles `array` as NumPy's RandomState.shuffle does a vector: for i from the last element down to the second, swap
// it with element j, drawn from [0, i] by masked rejection of 32 bits (64 where i needs them). Leaves `twister` where
// NumPy's would be. O(N); beyond the processor's caches it is bound by memory, of which each swap moves two lines.
template <class Element>
void legacy_shuffle(MersenneTwister& twister, std::span<Element> array, Isa level, Poll& poll);

}  // namespace trackbed
