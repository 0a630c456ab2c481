#pragma once

#include <cstddef>
#include <cstdint>

namespace trackbed {

// State of MT19937 (Matsumoto and Nishimura, 1998), as in NumPy's RandomState. Plain data, which can be stored
// anywhere.
struct MersenneTwister {
  static constexpr std::size_t kWords = 624;

  std::uint32_t words[kWords];
  std::uint32_t next;  // index of the next word to draw, in [0, kWords]; at kWords all words are regenerated
};

// Sets the state after RandomState(seed).
void seed(MersenneTwister& twister, std::uint32_t value);

}  // namespace trackbed
