#pragma once

#include <cstdint>
#include <span>

#include "trackbed/isa.hpp"
#include "trackbed/permutation.hpp"
#include "trackbed/poll.hpp"

namespace trackbed {

// Shuffles sizes[d] samples of each dataset d. Position k receives element permute(permutation, k) of the concatenated
// samples of all datasets: its dataset in `dataset_index`, and its number in that dataset in `dataset_sample_index`.
// Requires: sizes of at least 0 whose sum is permutation.size and the size of both outputs, numbers that fit Id and
// Sample, num_threads >= 1. O(N); writes each output once and in order, and needs only a table of a few MiB.
template <class Id, class Sample>
void balanced_blend(std::span<const std::int64_t> sizes, const Permutation& permutation, std::span<Id> dataset_index,
                    std::span<Sample> dataset_sample_index, Isa level, int num_threads, Poll& poll);

}  // namespace trackbed
