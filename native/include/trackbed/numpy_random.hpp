#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "trackbed/draw_targets.hpp"
#include "trackbed/isa.hpp"
#include "trackbed/mersenne_twister.hpp"

namespace trackbed {

// Draws of NumPy's RandomState, whose stream is frozen (NEP 19).
class NumpyRandom {
 public:
  NumpyRandom(std::uint32_t seed_value, Isa level) : draws_(target_draws_at(level)) { seed(twister_, seed_value); }

  // random(): in [0, 1), of 53 random bits.
  double random() {
    const std::uint32_t high = next() >> 5;
    const std::uint32_t low = next() >> 6;
    return (high * 67108864.0 + low) / 9007199254740992.0;
  }

  // random() < 0.5, which the highest bit decides.
  bool is_below_half() {
    const bool found = next() >> 31 == 0;
    next();
    return found;
  }

  // randint(0, most + 1): masked rejection; 0 without a draw if `most` is 0.
  std::uint32_t up_to(std::uint32_t most) {
    if (most == 0) {
      return 0;
    }
    const std::uint32_t mask = ~std::uint32_t{0} >> __builtin_clz(most);
    std::uint32_t drawn = next() & mask;
    while (drawn > most) {
      drawn = next() & mask;
    }
    return drawn;
  }

  // geometric(p) for p below a third, by inversion; as a double, because it may be large.
  double geometric(double p) { return std::ceil(std::log1p(-random()) / std::log1p(-p)); }

  // choice(len(cumulative), p=...) by cumulative probabilities, the last of which is 1.
  std::size_t choice(std::span<const double> cumulative) {
    return static_cast<std::size_t>(std::upper_bound(cumulative.begin(), cumulative.end(), random()) -
                                    cumulative.begin());
  }

  // shuffle(array), of at most 2^32 elements.
  template <class Element>
  void shuffle(std::span<Element> array) {
    std::uint32_t targets[MersenneTwister::kWords + 16];
    for (std::size_t last = array.empty() ? 0 : array.size() - 1; last > 0;) {
      const std::size_t count = draws_.narrow(twister_, last, targets);
      for (std::size_t k = 0; k < count; ++k, --last) {
        std::swap(array[last], array[targets[k]]);
      }
    }
  }

 private:
  std::uint32_t next() {
    if (twister_.next == MersenneTwister::kWords) {
      draws_.regenerate(twister_);
    }
    std::uint32_t word = twister_.words[twister_.next++];
    word ^= word >> 11;
    word ^= word << 7 & 0x9d2c5680U;
    word ^= word << 15 & 0xefc60000U;
    return word ^ word >> 18;
  }

  TargetDraws draws_;
  MersenneTwister twister_;
};

}  // namespace trackbed
