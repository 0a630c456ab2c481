#pragma once

#include <cstdint>
#include <span>

namespace trackbed {

// Gives parts to ranks, in the order of the parts: each to the candidate with the least load so far, the first of
// several. Part p costs `costs[p]`; its candidates are `ranks[first[p]]` to `ranks[end[p] - 1]`. Writes the place of
// the chosen candidate in `ranks` to `chosen[p]`, and adds the costs to `loads`. O(number of candidates of all parts).
// Requires: 0 <= first[p] < end[p] <= size of `ranks`; each rank is in [0, size of `loads`); loads stay below 2^63.
void assign_least_loaded(std::span<const std::int64_t> costs, std::span<const std::int64_t> first,
                         std::span<const std::int64_t> end, std::span<const std::int64_t> ranks,
                         std::span<std::int64_t> loads, std::span<std::int64_t> chosen);

}  // namespace trackbed
