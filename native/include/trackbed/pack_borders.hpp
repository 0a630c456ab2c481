#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace trackbed {

// Borders of B packs, as rows of M entries: places, padded places and trained labels; see PackedRows.
struct PackBorders {
  std::array<std::span<const std::int32_t>, 3> rows;  // B * M entries each
  std::size_t packs;
  std::size_t width;  // M, at least 1
};

struct JoinedBorders {
  std::vector<std::int32_t> borders;  // three vectors of n + 1 entries, one after the other, and one more that is 0
  std::int64_t num_places;            // padded places of all packs; from 2**31 on, borders have wrapped
};

// Joins the borders of packs end to end. Each segment that has a place gives one; with `keeps_all` there are
// B * (M - 1) + 1, of which the last one is repeated. O(B * M).
JoinedBorders join_borders(const PackBorders& packs, bool keeps_all);

}  // namespace trackbed
