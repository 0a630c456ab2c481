#include "trackbed/instant.hpp"

#include <algorithm>
#include <cstddef>

#include "trackbed/parallel.hpp"

namespace trackbed {

void instant_locate(const BlendTrees& trees, const EpochShuffles& shuffles, std::span<const std::int64_t> positions,
                    std::span<std::int32_t> datasets, std::span<std::int64_t> draws, std::span<std::int64_t> samples,
                    int num_threads, Poll& poll) {
  constexpr std::size_t kTask = std::size_t{1} << 14;  // about a millisecond
  const std::size_t num_tasks = (positions.size() + kTask - 1) / kTask;
  run_parallel(static_cast<std::int64_t>(num_tasks), num_threads, poll, kTask, [&](std::int64_t task) {
    const std::size_t start = static_cast<std::size_t>(task) * kTask;
    const std::size_t count = std::min(kTask, positions.size() - start);
    const std::span<std::int32_t> its_datasets = datasets.subspan(start, count);
    const std::span<std::int64_t> its_draws = draws.subspan(start, count);
    interleave(trees, positions.subspan(start, count), its_datasets, its_draws);
    epoch_samples(shuffles, its_datasets, its_draws, samples.subspan(start, count));
  });
}

}  // namespace trackbed
