#include "trackbed/instant.hpp"

#include <algorithm>

#include "trackbed/parallel.hpp"

namespace trackbed {

namespace {

// Positions of one task: a millisecond or two.
constexpr std::size_t kTask = 1 << 14;

void samples_of(const EpochShuffles& shuffles, std::span<const std::int32_t> datasets,
                std::span<const std::int64_t> draws, std::span<std::int64_t> samples) {
  for (std::size_t i = 0; i < datasets.size(); ++i) {
    const auto dataset = static_cast<std::size_t>(datasets[i]);
    const auto draw = static_cast<std::uint64_t>(draws[i]);
    const Permutation& any_epoch = shuffles.permutations[dataset];
    // Most draws are of the first epoch, and a division takes half as long as all the rest.
    const std::uint64_t epoch = draw < any_epoch.size ? 0 : draw / any_epoch.size;
    const Permutation shuffle = with_key(any_epoch, epoch_key(shuffles.keys[dataset], epoch));
    samples[i] = static_cast<std::int64_t>(permute(shuffle, draw - epoch * shuffle.size));
  }
}

}  // namespace

std::uint64_t epoch_key(std::uint64_t dataset_key, std::uint64_t epoch) {
  std::uint64_t word = dataset_key + 0x9e3779b97f4a7c15U * (epoch + 1);
  word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9U;
  word = (word ^ word >> 27) * 0x94d049bb133111ebU;
  return word ^ word >> 31;
}

void instant_locate(const BlendTrees& trees, const EpochShuffles& shuffles, std::span<const std::int64_t> positions,
                    std::span<std::int32_t> datasets, std::span<std::int64_t> draws, std::span<std::int64_t> samples,
                    int num_threads, Poll& poll) {
  const std::size_t num_tasks = (positions.size() + kTask - 1) / kTask;
  run_parallel(static_cast<std::int64_t>(num_tasks), num_threads, poll, kTask, [&](std::int64_t task) {
    const std::size_t start = static_cast<std::size_t>(task) * kTask;
    const std::size_t count = std::min(kTask, positions.size() - start);
    const std::span<std::int32_t> task_datasets = datasets.subspan(start, count);
    const std::span<std::int64_t> task_draws = draws.subspan(start, count);
    interleave(trees, positions.subspan(start, count), task_datasets, task_draws);
    samples_of(shuffles, task_datasets, task_draws, samples.subspan(start, count));
  });
}

}  // namespace trackbed
