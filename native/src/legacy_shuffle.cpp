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

// Swaps the elements from `last` down with their targets, and prefetches the elements at `upcoming`.
template <class Element, class Target>
void swap_block(std::span<Element> array, std::uint64_t last, std::span<const Target> targets,
                std::span<const Target> upcoming) {
  const std::size_t both = std::min(targets.size(), upcoming.size());
  for (std::size_t k = 0; k < both; ++k) {
    __builtin_prefetch(&array[upcoming[k]], 1);
    std::swap(array[targets[k]], array[last - k]);
  }
  for (std::size_t k = both; k < upcoming.size(); ++k) {
    __builtin_prefetch(&array[upcoming[k]], 1);
  }
  for (std::size_t k = both; k < targets.size(); ++k) {
    std::swap(array[targets[k]], array[last - k]);
  }
}

}  // namespace

template <class Element>
void legacy_shuffle(MersenneTwister& twister, std::span<Element> array, Isa level, Poll& poll) {
  constexpr std::uint64_t kNarrow = 0xffffffff;
  const TargetDraws draws = target_draws_at(level);
  const std::size_t size = array.size();
  std::uint64_t last = size > 0 ? size - 1 : 0;
  // Targets are drawn one block ahead, so that their elements are prefetched while the previous block is swapped.
  while (last > kNarrow) {
    std::uint64_t targets[256];
    const std::size_t count = std::min<std::uint64_t>(std::size(targets), last - kNarrow);
    draws.wide(twister, last, targets, count);
    swap_block<Element, std::uint64_t>(array, last, {}, {targets, count});
    swap_block<Element, std::uint64_t>(array, last, {targets, count}, {});
    last -= count;
    poll(static_cast<std::int64_t>(size - 1 - last));
  }
  std::uint32_t blocks[2][MersenneTwister::kWords + 16];
  std::size_t waiting = 0;  // number of targets in the previous block
  std::uint64_t undrawn = last;
  for (unsigned turn = 0; last > 0; turn ^= 1) {
    const std::size_t count = undrawn > 0 ? draws.narrow(twister, undrawn, blocks[turn]) : 0;
    undrawn -= count;
    swap_block<Element, std::uint32_t>(array, last, {blocks[turn ^ 1], waiting}, {blocks[turn], count});
    last -= waiting;
    waiting = count;
    poll(static_cast<std::int64_t>(size - 1 - last));
  }
}

template void legacy_shuffle(MersenneTwister&, std::span<std::uint32_t>, Isa, Poll&);
template void legacy_shuffle(MersenneTwister&, std::span<std::uint64_t>, Isa, Poll&);

}  // namespace trackbed
