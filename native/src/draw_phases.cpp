#include <algorithm>
#include <cstddef>
#include <vector>

#include "trackbed/interleaving.hpp"
#include "trackbed/split_mix.hpp"

namespace trackbed {

namespace {

__extension__ typedef unsigned __int128 Product;

// Reaches and bands are fractions of 2**32.
constexpr std::uint64_t kOne = std::uint64_t{1} << 32;
constexpr std::uint64_t kFarthest = kOne / 8 * 15;

// Largest distance of phases from 1/2 for which reach * (1/2 + band) is at most 15/8.
std::uint64_t band_for(std::uint64_t reach) {
  const std::uint64_t taken = (reach + 1) / 2;
  const std::uint64_t left = taken < kFarthest ? kFarthest - taken : 0;
  // If the quotient is below 1/2, `left` is below 15/16, and the product does not overflow.
  return 2 * left >= reach ? kOne / 2 : left * kOne / reach;
}

}  // namespace

void draw_phases(std::span<InterleavingNode> nodes, std::size_t num_leaves, std::uint64_t key) {
  std::vector<std::uint64_t> reaches(nodes.size(), 0);
  const auto reach_below = [](std::uint64_t reach, std::uint64_t share) {
    const Product rounded_up = Product{reach} * share + ~std::uint64_t{0};
    return kOne + static_cast<std::uint64_t>(rounded_up >> 64);
  };
  for (std::size_t i = nodes.size(); i-- > num_leaves;) {
    const InterleavingNode& node = nodes[i];
    reaches[node.left] = reach_below(reaches[i], node.share);
    reaches[node.right] = reach_below(reaches[i], 0 - node.share);
  }
  std::vector<std::uint64_t> bands(nodes.size(), 0);
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    InterleavingNode& node = nodes[i];
    if (i < num_leaves) {
      bands[i] = reaches[i] > 0 ? band_for(reaches[i]) : 0;  // 0 for datasets that are not drawn
    } else {
      bands[i] = std::min(bands[node.left], bands[node.right]);
      const Product offset = Product{split_mix(key, i - num_leaves)} * bands[i] >> 31;
      node.phase = (kOne / 2 - bands[i]) * kOne + static_cast<std::uint64_t>(offset);
    }
  }
}

}  // namespace trackbed
