#include "trackbed/small_indices.hpp"

#include <numeric>

#include "trackbed/legacy_shuffle.hpp"
#include "trackbed/sample_index.hpp"

namespace trackbed {
namespace {

// Shuffles the first `border` elements, then the others.
void shuffle_parts(MersenneTwister& twister, std::span<std::uint32_t> array, std::int64_t border, Isa level,
                   Poll& poll) {
  const auto first = static_cast<std::size_t>(border);
  legacy_shuffle<std::uint32_t>(twister, array.first(first), level, poll);
  legacy_shuffle<std::uint32_t>(twister, array.subspan(first), level, poll);
}

template <class Number>
std::span<Number> as_numbers(std::span<std::uint32_t> words) {
  return {reinterpret_cast<Number*>(words.data()), words.size()};
}

// Builds the indices of one dataset. Returns false if the length of a visited document is missing or negative.
bool fill(const SmallDataset& dataset, std::span<const std::byte> lengths, std::span<std::uint32_t> indices, Isa level,
          Poll& poll) {
  const bool is_apart = dataset.samples_before_last >= 0;
  const auto num_documents = static_cast<std::size_t>(dataset.num_documents);
  const std::int64_t num_visits = dataset.num_epochs * dataset.num_documents;
  const auto visits = indices.first(static_cast<std::size_t>(num_visits));
  const auto order = indices.last(static_cast<std::size_t>(dataset.num_samples));
  const auto rows = indices.subspan(visits.size(), indices.size() - visits.size() - order.size());
  MersenneTwister twister;
  seed(twister, static_cast<std::uint32_t>(dataset.seed));
  for (std::size_t visit = 0; visit < visits.size(); visit += num_documents) {
    const auto epoch = visits.subspan(visit, num_documents);
    std::iota(epoch.begin(), epoch.end(), 0U);
  }
  shuffle_parts(twister, visits, is_apart ? num_visits - dataset.num_documents : 0, level, poll);
  const auto seen = as_numbers<std::int32_t>(visits);
  if (sample_index<std::int32_t, std::int32_t>(lengths, seen, dataset.sequence_length, dataset.extra_token,
                                               as_numbers<std::int32_t>(rows), 1, poll) < visits.size()) {
    return false;
  }
  for (std::uint32_t& visit : visits) {
    visit += static_cast<std::uint32_t>(dataset.first);
  }
  std::iota(order.begin(), order.end(), 0U);
  shuffle_parts(twister, order, is_apart ? dataset.samples_before_last : 0, level, poll);
  return true;
}

}  // namespace

std::size_t small_indices(std::span<const SmallDataset> datasets, std::span<const std::span<const std::byte>> lengths,
                          std::span<std::uint32_t> indices, Isa level, Poll& poll) {
  for (std::size_t number = 0; number < datasets.size(); ++number) {
    const auto room = static_cast<std::size_t>(room_of(datasets[number]));
    if (!fill(datasets[number], lengths[number], indices.first(room), level, poll)) {
      return number;
    }
    indices = indices.subspan(room);
    poll(static_cast<std::int64_t>(number) + 1);
  }
  return datasets.size();
}

}  // namespace trackbed
