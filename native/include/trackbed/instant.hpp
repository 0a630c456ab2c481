#pragma once

#include <cstdint>
#include <span>

#include "trackbed/epoch_samples.hpp"
#include "trackbed/interleaving.hpp"
#include "trackbed/poll.hpp"

namespace trackbed {

// Computes dataset, draw and sample at each position of the instant order: interleave(), then epoch_samples(), on at
// most num_threads threads.
// Requires: what those two require, and as many datasets in the shuffles as in the trees.
void instant_locate(const BlendTrees& trees, const EpochShuffles& shuffles, std::span<const std::int64_t> positions,
                    std::span<std::int32_t> datasets, std::span<std::int64_t> draws, std::span<std::int64_t> samples,
                    int num_threads, Poll& poll);

}  // namespace trackbed
