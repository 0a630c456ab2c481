#pragma once

#include <cstddef>
#include <cstdint>

namespace trackbed {

// The state of MT19937 (Matsumoto and Nishimura, 1998), as NumPy's RandomState keeps it. Plain data, so that whoever
// owns it may keep it in any memory.
struct MersenneTwister {
  static constexpr std::size_t kWords = 624;

  std::uint32_t words[kWords];
  std::uint32_t next;  // the word that is drawn next, in [0, kWords]; at kWords all are made anew
};

// The state after RandomState(seed).
void seed(MersenneTwister& twister, std::uint32_t value);

}  // namespace trackbed
