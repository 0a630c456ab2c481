#pragma once

#include <span>

#include "trackbed/isa.hpp"
#include "trackbed/mersenne_twister.hpp"
#include "trackbed/poll.hpp"

namespace trackbed {

// Shuffles `array` as NumPy's RandomState.shuffle shuffles a vector: swaps element i, from the last one down to the
// second, with element j, drawn from [0, i] by masked rejection of 32 bits (64 where i needs them). Advances `twister`
// like NumPy's. O(N); arrays that exceed the caches are bound by memory, as each swap touches two cache lines.
template <class Element>
void legacy_shuffle(MersenneTwister& twister, std::span<Element> array, Isa level, Poll& poll);

}  // namespace trackbed
