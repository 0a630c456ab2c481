#include "trackbed/pack_borders.hpp"

#include <algorithm>

namespace trackbed {

JoinedBorders join_borders(const PackBorders& packs, bool keeps_all) {
  const std::span<const std::int32_t> padded = packs.rows[1];
  std::vector<std::size_t> kept;  // the entries that end a segment
  kept.reserve(packs.packs * packs.width);
  JoinedBorders found{{}, 0};
  for (std::size_t first = 0; first < packs.packs * packs.width; first += packs.width) {
    for (std::size_t i = first + 1; i < first + packs.width && padded[i] > padded[i - 1]; ++i) {
      kept.push_back(i);
    }
    found.num_places += padded[first + packs.width - 1];
  }
  const std::size_t count = 1 + (keeps_all ? packs.packs * (packs.width - 1) : kept.size());
  found.borders.assign(3 * count + 1, 0);
  for (std::size_t row = 0; row < packs.rows.size(); ++row) {
    std::int32_t* const out = found.borders.data() + row * count;
    std::size_t next = 0;
    std::int64_t before = 0;
    for (std::size_t first = 0; first < packs.packs * packs.width; first += packs.width) {
      for (; next < kept.size() && kept[next] < first + packs.width; ++next) {
        out[next + 1] = static_cast<std::int32_t>(before + packs.rows[row][kept[next]]);
      }
      before += packs.rows[row][first + packs.width - 1];
    }
    std::fill(out + next + 1, out + count, out[next]);
  }
  return found;
}

}  // namespace trackbed
