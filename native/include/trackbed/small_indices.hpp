#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "trackbed/isa.hpp"
#include "trackbed/poll.hpp"

namespace trackbed {

// Parameters of a dataset with few documents, which are consecutive in their file. D documents, E epochs, V = E * D
// visits, R samples.
struct SmallDataset {
  std::int64_t first;                // number of the first document
  std::int64_t num_documents;        // D
  std::int64_t num_epochs;           // E, at least 1
  std::int64_t num_samples;          // R
  std::int64_t samples_before_last;  // samples of all epochs but the last if that one is shuffled separately, else -1
  std::int64_t sequence_length;
  std::int64_t extra_token;
  std::int64_t seed;  // in [0, 2**32)
};

// Size of a dataset's indices in 32-bit numbers.
constexpr std::int64_t room_of(const SmallDataset& dataset) {
  return dataset.num_epochs * dataset.num_documents + 2 * (dataset.num_samples + 1) + dataset.num_samples;
}

// Builds the three indices of each dataset, consecutively in `indices`: the document of each visit [V], the rows of
// sample_index() [R + 1, 2], and the sample at each position [R]. Each dataset has its own stream of shuffles, which
// shuffles the visits of all epochs together, or those of the last epoch after those of the others; then the samples
// likewise.
// `lengths` holds the lengths of the documents of each dataset, as for sample_index().
// Returns the first dataset with a document whose length is missing or negative, or else the number of datasets. The
// indices from the returned dataset on are undefined.
// Requires: as many lengths as datasets, `indices` of the sum of room_of() over the datasets, and what sample_index()
// requires of 32-bit rows. O(V + R) per dataset.
std::size_t small_indices(std::span<const SmallDataset> datasets, std::span<const std::span<const std::byte>> lengths,
                          std::span<std::uint32_t> indices, Isa level, Poll& poll);

}  // namespace trackbed
