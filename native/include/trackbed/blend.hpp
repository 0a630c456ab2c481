#pragma once

#include <cstdint>
#include <span>

#include "trackbed/isa.hpp"
#include "trackbed/poll.hpp"

namespace trackbed {

// Draws dataset_index.size() samples, each from the dataset that is furthest behind its share:
// sample i comes from d = argmax(weights[d] * max(i, 1) - drawn[d]), the lowest d on ties, and is the
// drawn[d]-th of that dataset.
// Requires: both outputs of equal size, weights.size() in [1, 2**31), no NaN, dataset numbers that fit Id.
// About O(N sqrt(K)); O(N K) if a weight is negative, or if weights are so nearly equal that errors hardly differ.
template <class Id>
void greedy_blend(std::span<const double> weights, std::span<Id> dataset_index,
                  std::span<std::int64_t> dataset_sample_index, Isa level, Poll& poll);

// Draws exactly sizes[d] samples from each dataset d, by the same rule among the datasets that have
// samples left, with weights[d] = sizes[d] / N in doubles.
// Requires: every size >= 1, and both outputs of size N = sum(sizes). Complexity as above.
template <class Id>
void exhaustive_blend(std::span<const std::int64_t> sizes, std::span<Id> dataset_index,
                      std::span<std::int64_t> dataset_sample_index, Isa level, Poll& poll);

}  // namespace trackbed
