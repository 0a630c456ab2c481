#include "trackbed/balanced_blend.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <numeric>
#include <vector>

#include "trackbed/parallel.hpp"
#include "trackbed/permute_block.hpp"

namespace trackbed {

namespace {

constexpr std::int64_t kTask = 1 << 18;  // positions per task
constexpr std::size_t kTile = 1 << 11;   // positions whose images stay in a core's cache

// Lookup of the dataset of each of the concatenated samples of all datasets.
class Ranges {
 public:
  explicit Ranges(std::span<const std::int64_t> sizes) : starts_(sizes.size() + 1, 0) {
    std::partial_sum(sizes.begin(), sizes.end(), starts_.begin() + 1);
    const auto total = static_cast<std::uint64_t>(starts_.back());
    // Several stretches of equal length per dataset, so that most stretches lie in one dataset.
    const std::size_t wanted = std::bit_ceil(std::max<std::size_t>(sizes.size() * 32, 1 << 16));
    while ((total >> shift_) >= wanted) {
      ++shift_;
    }
    std::uint32_t dataset = 0;
    for (std::uint64_t start = 0; start < total; start += std::uint64_t{1} << shift_) {
      dataset = advance(dataset, static_cast<std::int64_t>(start));
      first_.push_back(dataset);
    }
  }

  std::uint32_t dataset_of(std::int64_t sample) const {
    return advance(first_[static_cast<std::uint64_t>(sample) >> shift_], sample);
  }
  std::int64_t start_of(std::uint32_t dataset) const { return starts_[dataset]; }

 private:
  std::uint32_t advance(std::uint32_t dataset, std::int64_t sample) const {
    while (sample >= starts_[dataset + 1]) {
      ++dataset;
    }
    return dataset;
  }

  std::vector<std::int64_t> starts_;  // first sample of each dataset, then the end of the last one
  unsigned shift_ = 0;
  std::vector<std::uint32_t> first_;  // dataset in which each stretch of 2**shift_ samples begins
};

}  // namespace

template <class Id, class Sample>
void balanced_blend(std::span<const std::int64_t> sizes, const Permutation& permutation, std::span<Id> dataset_index,
                    std::span<Sample> dataset_sample_index, Isa level, int num_threads, Poll& poll) {
  const Ranges ranges(sizes);
  const PermuteBlock permute_block = permute_block_at(level);
  const auto size = static_cast<std::int64_t>(dataset_index.size());
  run_parallel((size + kTask - 1) / kTask, num_threads, poll, kTask, [&](std::int64_t task) {
    std::int64_t tile[kTile];
    const std::int64_t stop = std::min(size, (task + 1) * kTask);
    for (std::int64_t position = task * kTask; position < stop;) {
      const auto count = static_cast<std::size_t>(std::min<std::int64_t>(kTile, stop - position));
      std::iota(tile, tile + count, position);
      permute_block(permutation, tile, tile, count);
      Id* const datasets = dataset_index.data() + position;
      Sample* const samples = dataset_sample_index.data() + position;
      for (std::size_t k = 0; k < count; ++k) {
        const std::uint32_t dataset = ranges.dataset_of(tile[k]);
        datasets[k] = static_cast<Id>(dataset);
        samples[k] = static_cast<Sample>(tile[k] - ranges.start_of(dataset));
      }
      position += static_cast<std::int64_t>(count);
    }
  });
}

#define TRACKBED_BALANCED_BLEND(Id, Sample)                                                                         \
  template void balanced_blend(std::span<const std::int64_t>, const Permutation&, std::span<Id>, std::span<Sample>, \
                               Isa, int, Poll&);

TRACKBED_BALANCED_BLEND(std::uint16_t, std::uint32_t)
TRACKBED_BALANCED_BLEND(std::uint16_t, std::int64_t)
TRACKBED_BALANCED_BLEND(std::uint32_t, std::uint32_t)
TRACKBED_BALANCED_BLEND(std::uint32_t, std::int64_t)

}  // namespace trackbed
