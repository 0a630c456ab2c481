#include <algorithm>
#include <vector>

#include "trackbed/blend.hpp"
#include "trackbed/largest_error.hpp"

namespace trackbed {

template <class Id>
void greedy_blend(std::span<const double> weights, std::span<Id> dataset_index,
                  std::span<std::int64_t> dataset_sample_index, Isa level) {
  const LargestError largest_error = largest_error_at(level);
  std::vector<double> drawn(weights.size(), 0.0);
  for (std::size_t i = 0; i < dataset_index.size(); ++i) {
    const std::size_t dataset =
        largest_error(weights.data(), drawn.data(), weights.size(), std::max(static_cast<double>(i), 1.0));
    dataset_index[i] = static_cast<Id>(dataset);
    dataset_sample_index[i] = static_cast<std::int64_t>(drawn[dataset]);
    drawn[dataset] += 1.0;
  }
}

template void greedy_blend(std::span<const double>, std::span<std::int16_t>, std::span<std::int64_t>, Isa);
template void greedy_blend(std::span<const double>, std::span<std::int32_t>, std::span<std::int64_t>, Isa);

}  // namespace trackbed
