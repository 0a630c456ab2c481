#include "trackbed/least_loaded.hpp"

#include <cstddef>

namespace trackbed {

void assign_least_loaded(std::span<const std::int64_t> costs, std::span<const std::int64_t> first,
                         std::span<const std::int64_t> end, std::span<const std::int64_t> ranks,
                         std::span<std::int64_t> loads, std::span<std::int64_t> chosen) {
  const auto load_at = [&](std::int64_t place) -> std::int64_t& {
    return loads[static_cast<std::size_t>(ranks[static_cast<std::size_t>(place)])];
  };
  for (std::size_t part = 0; part < costs.size(); ++part) {
    std::int64_t best = first[part];
    for (std::int64_t place = best + 1; place < end[part]; ++place) {
      if (load_at(place) < load_at(best)) {
        best = place;
      }
    }
    load_at(best) += costs[part];
    chosen[part] = best;
  }
}

}  // namespace trackbed
