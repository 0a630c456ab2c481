#include "trackbed/legacy_shuffle.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "trackbed/draw_targets.hpp"

namespace trackbed {

void seed(MersenneTwister& twister, std::uint32_t value) {
  for (std::size_t i = 0; i < MersenneTwister::kWords; ++i) {
    twister.words[i] = value;
    value = 1812433253U * (value ^ value >> 30) + static_cast<std::uint32_t>(i) + 1;
  }
  twister.next = MersenneTwister::kWords;
}

namespace {

// Elements between a prefetch and its swap: enough to overlap cache misses. With 500, address translations are evicted
// before they are used. The target is the second-level cache: the first one tracks fewer misses.
constexpr std::size_t kAhead = 128;

// Shuffles the elements from `last` down to the one above `stop`. draw(element, targets) draws targets of at least one
// element from `element` down, at most `kMost`, and returns their number.
template <class Target, std::size_t kMost, class Element, class Draw>
void swap_down(std::span<Element> array, std::uint64_t last, std::uint64_t stop, const Draw& draw, Poll& poll) {
  Target targets[kAhead + kMost];
  std::size_t drawn = 0;
  std::uint64_t undrawn = last;
  while (last > stop) {
    if (undrawn > stop) {
      const std::size_t count = draw(undrawn, targets + drawn);
      undrawn -= count;
      drawn += count;
    }
    const std::size_t followed = drawn > kAhead ? drawn - kAhead : 0;
    const std::size_t count = undrawn > stop ? followed : drawn;
    for (std::size_t k = 0; k < followed; ++k) {
      __builtin_prefetch(&array[targets[k + kAhead]], 0, 2);
      std::swap(array[targets[k]], array[last - k]);
    }
    for (std::size_t k = followed; k < count; ++k) {
      std::swap(array[targets[k]], array[last - k]);
    }
    std::copy(targets + count, targets + drawn, targets);
    drawn -= count;
    last -= count;
    poll(static_cast<std::int64_t>(array.size() - 1 - last));
  }
}

}  // namespace

template <class Element>
void legacy_shuffle(MersenneTwister& twister, std::span<Element> array, Isa level, Poll& poll) {
  constexpr std::uint64_t kNarrow = 0xffffffff;
  constexpr std::size_t kWide = 256;
  const TargetDraws draws = target_draws_at(level);
  const std::uint64_t last = array.empty() ? 0 : array.size() - 1;
  const auto wide = [&](std::uint64_t element, std::uint64_t* targets) {
    const std::size_t count = std::min<std::uint64_t>(kWide, element - kNarrow);
    draws.wide(twister, element, targets, count);
    return count;
  };
  const auto narrow = [&](std::uint64_t element, std::uint32_t* targets) {
    return draws.narrow(twister, element, targets);
  };
  swap_down<std::uint64_t, kWide>(array, last, kNarrow, wide, poll);
  swap_down<std::uint32_t, MersenneTwister::kWords + 16>(array, std::min(last, kNarrow), 0, narrow, poll);
}

template void legacy_shuffle(MersenneTwister&, std::span<std::uint32_t>, Isa, Poll&);
template void legacy_shuffle(MersenneTwister&, std::span<std::uint64_t>, Isa, Poll&);

}  // namespace trackbed
