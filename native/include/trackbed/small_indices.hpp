#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "trackbed/isa.hpp"
#include "trackbed/poll.hpp"

namespace trackbed {

// A dataset of few documents, which follow one another in their file. D documents, E epochs, V = E * D visits, R
// samples.
struct SmallDataset {
  std::int64_t first;                // the number of its first document
  std::int64_t num_documents;        // D
  std::int64_t num_epochs;           // E, at least 1
  std::int64_t num_samples;          // R
  std::int64_t samples_before_last;  // those of all epochs but the last where that one is shuffled apart, else -1
  std::int64_t sequence_length;
  std::int64_t extra_token;
  std::int64_t seed;  // in [0, 2**32)
};

// How much room its indices take, in 32-bit numbers.
constexpr std::int64_t room_of(const SmallDataset& dataset) {
  return dataset.num_epochs * dataset.num_documents + 2 * (dataset.num_samples + 1) + dataset.num_samples;
}

// The three indices of each dataset, one after the other in `indices`: the document of each visit [V], the rows of
// sample_index() [R + 1, 2], and the sample at each position [R]. Each has a stream of shuffles of its own: the visits
// of all epochs together, or the last epoch's after those of the others; then the samples likewise.
// `lengths` holds, for each dataset, the lengths of its documents, as for sample_index().
// Returns the first dataset with a document that has none, or a negative one; or how many there are. What was not
// reached then means nothing.
// Requires: as many lengths as datasets, `indices` as long as the room of all together, and what sample_index()
// requires of 32-bit rows. O(V + R) each.
std::size_t small_indices(std::span<const SmallDataset> datasets, std::span<const std::span<const std::byte>> lengths,
                          std::span<std::uint32_t> indices, Isa level, Poll& poll);

}  // namespace trackbed
