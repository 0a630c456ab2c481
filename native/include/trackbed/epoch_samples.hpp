#pragma once

#include <cstdint>
#include <span>

#include "trackbed/permutation.hpp"

namespace trackbed {

// In which order each of K datasets gives its samples, epoch after epoch: draw j of a dataset of n samples is, with
// e = j / n, the sample at position j % n of the shuffle whose key is word e of
// the SplitMix64 stream that starts at the dataset's key.
struct EpochShuffles {
  std::span<const Permutation> permutations;  // [K] each of the dataset's size; their keys do not matter
  std::span<const std::uint64_t> keys;        // [K]
  std::uint64_t block;                        // as for make_block_permutation; 1 shuffles all samples
  std::uint64_t window;
};

// The sample that each draw gives.
// Requires: three spans of one length, datasets in [0, K), draws of at least 0, block and window of at least 1.
// O(N) with block = 1, where a few draws take turns, as each is a chain of products that wait for each other. Else
// O(N + K), and below 1 us more for each epoch of each dataset, as often as draws change from one to another.
void epoch_samples(const EpochShuffles& shuffles, std::span<const std::int32_t> datasets,
                   std::span<const std::int64_t> draws, std::span<std::int64_t> samples);

}  // namespace trackbed
