#include <algorithm>
#include <numeric>
#include <vector>

#include "trackbed/blend.hpp"
#include "trackbed/largest_error.hpp"

namespace trackbed {

template <class Id>
void exhaustive_blend(std::span<const std::int64_t> sizes, std::span<Id> dataset_index,
                      std::span<std::int64_t> dataset_sample_index, Isa level) {
  const LargestError largest_error = largest_error_at(level);
  const auto total = static_cast<double>(dataset_index.size());

  // The datasets that have samples left, in ascending order: entry e is dataset left[e].
  std::vector<std::size_t> left(sizes.size());
  std::iota(left.begin(), left.end(), std::size_t{0});
  std::vector<double> weights(sizes.size());
  std::transform(sizes.begin(), sizes.end(), weights.begin(),
                 [total](std::int64_t size) { return static_cast<double>(size) / total; });
  std::vector<double> drawn(sizes.size(), 0.0);

  for (std::size_t i = 0; i < dataset_index.size(); ++i) {
    const std::size_t entry =
        largest_error(weights.data(), drawn.data(), weights.size(), std::max(static_cast<double>(i), 1.0));
    const std::size_t dataset = left[entry];
    dataset_index[i] = static_cast<Id>(dataset);
    dataset_sample_index[i] = static_cast<std::int64_t>(drawn[entry]);
    drawn[entry] += 1.0;
    if (static_cast<std::int64_t>(drawn[entry]) == sizes[dataset]) {
      const auto at = static_cast<std::ptrdiff_t>(entry);
      left.erase(left.begin() + at);
      weights.erase(weights.begin() + at);
      drawn.erase(drawn.begin() + at);
    }
  }
}

template void exhaustive_blend(std::span<const std::int64_t>, std::span<std::int16_t>, std::span<std::int64_t>, Isa);
template void exhaustive_blend(std::span<const std::int64_t>, std::span<std::int32_t>, std::span<std::int64_t>, Isa);

}  // namespace trackbed
