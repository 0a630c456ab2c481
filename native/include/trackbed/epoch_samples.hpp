#pragma once

#include <cstdint>
#include <span>

#include "trackbed/permutation.hpp"

namespace trackbed {

// Shuffles of the epochs of K datasets. With e = j / n, draw j of a dataset of n samples is the sample at position
// j % n of the shuffle whose key is word e of the SplitMix64 stream that starts at the dataset's key.
struct EpochShuffles {
  std::span<const Permutation> permutations;  // [K] each of the dataset's size; their keys are not used
  std::span<const std::uint64_t> keys;        // [K]
  std::uint64_t block;                        // as for make_block_permutation; 1 shuffles all samples
  std::uint64_t window;
};

// Computes the sample of each draw.
// Requires: three spans of equal length, datasets in [0, K), draws of at least 0, block and window of at least 1.
// O(N) with block = 1; several draws are interleaved, because each is a chain of dependent multiplications. Otherwise
// O(N + K), plus less than 1 us whenever consecutive draws from a dataset are of different epochs.
void epoch_samples(const EpochShuffles& shuffles, std::span<const std::int32_t> datasets,
                   std::span<const std::int64_t> draws, std::span<std::int64_t> samples);

}  // namespace trackbed
