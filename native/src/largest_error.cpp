// Compiled once per instruction level, into the namespace that TRACKBED_LEVEL names. It uses no inline
// library code: that could be emitted here at a high level and then be picked by the linker for all.

#include <cstddef>
#include <cstdint>

namespace trackbed::TRACKBED_LEVEL {

namespace {

using Lanes = double __attribute__((vector_size(TRACKBED_LANE_BYTES), aligned(8), may_alias));
using LaneIndices = std::int64_t __attribute__((vector_size(TRACKBED_LANE_BYTES)));
constexpr std::size_t kLanes = TRACKBED_LANE_BYTES / sizeof(double);

}  // namespace

// Each lane keeps the first largest error of the datasets it looks at. The lanes are compared at the end,
// where the lowest dataset wins among equals.
std::size_t largest_error(const double* weights, const double* counts, std::size_t size, double step) {
  std::size_t best = 0;
  double best_error = weights[0] * step - counts[0];
  std::size_t next = 1;
  if (size >= kLanes) {
    Lanes lane_error = *reinterpret_cast<const Lanes*>(weights) * step - *reinterpret_cast<const Lanes*>(counts);
    LaneIndices lane_best;
    LaneIndices here;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      lane_best[lane] = here[lane] = static_cast<std::int64_t>(lane);
    }
    for (next = kLanes; next + kLanes <= size; next += kLanes) {
      here += static_cast<std::int64_t>(kLanes);
      const Lanes error =
          *reinterpret_cast<const Lanes*>(weights + next) * step - *reinterpret_cast<const Lanes*>(counts + next);
      const LaneIndices larger = error > lane_error;
      lane_error = larger ? error : lane_error;
      lane_best = larger ? here : lane_best;
    }
    best = static_cast<std::size_t>(lane_best[0]);
    best_error = lane_error[0];
    for (std::size_t lane = 1; lane < kLanes; ++lane) {
      const auto dataset = static_cast<std::size_t>(lane_best[lane]);
      if (lane_error[lane] > best_error || (lane_error[lane] == best_error && dataset < best)) {
        best_error = lane_error[lane];
        best = dataset;
      }
    }
  }
  for (; next < size; ++next) {
    const double error = weights[next] * step - counts[next];
    if (error > best_error) {
      best_error = error;
      best = next;
    }
  }
  return best;
}

}  // namespace trackbed::TRACKBED_LEVEL
