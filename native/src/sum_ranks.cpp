#include "trackbed/sum_ranks.hpp"

#include <algorithm>
#include <vector>

#include "trackbed/parallel.hpp"

namespace trackbed {

namespace {

constexpr std::size_t kElementsPerTask = std::size_t{1} << 18;

}  // namespace

void sum_ranks(const RankSum& sum, Isa level, int num_threads, Poll& poll) {
  const SumLoop loop = sum_loop_at(level);
  const std::size_t num_tasks = (sum.stop - sum.start + kElementsPerTask - 1) / kElementsPerTask;
  run_parallel(static_cast<std::int64_t>(num_tasks), num_threads, poll, kElementsPerTask, [&](std::int64_t task) {
    const std::size_t start = sum.start + static_cast<std::size_t>(task) * kElementsPerTask;
    std::vector<double> rows((sum.num_ranks + 1) / 2 * kSumRowBytes / sizeof(double));
    loop(sum, start, std::min(sum.stop, start + kElementsPerTask), reinterpret_cast<std::byte*>(rows.data()));
  });
}

}  // namespace trackbed
