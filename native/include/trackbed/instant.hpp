#pragma once

#include <cstdint>
#include <span>

#include "trackbed/interleaving.hpp"
#include "trackbed/permutation.hpp"
#include "trackbed/poll.hpp"

namespace trackbed {

// In which order each of K datasets gives its samples, epoch after epoch: draw j of a dataset of n samples is, with
// e = j / n, sample permute(j % n) under the key that the dataset's key and e make.
struct EpochShuffles {
  std::span<const Permutation> permutations;  // [K] each of the dataset's size, under any key
  std::span<const std::uint64_t> keys;        // [K]
};

// The key of an epoch: word number `epoch` of the SplitMix64 stream that starts at a dataset's key.
std::uint64_t epoch_key(std::uint64_t dataset_key, std::uint64_t epoch);

// The dataset, draw and sample at each position of the instant order, on at most num_threads threads.
// Requires: what interleave() requires, and as many permutations and keys as the trees have datasets.
// O(depth + 1) a position.
void instant_locate(const BlendTrees& trees, const EpochShuffles& shuffles, std::span<const std::int64_t> positions,
                    std::span<std::int32_t> datasets, std::span<std::int64_t> draws, std::span<std::int64_t> samples,
                    int num_threads, Poll& poll);

}  // namespace trackbed
