#include "trackbed/pack_balance.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace trackbed {

void leaf_costs(std::span<const PackNode> nodes, std::span<const PackLeaf> leaves, std::uint64_t multiple,
                std::uint64_t linear, std::span<std::int64_t> costs) {
  std::vector<std::uint64_t> of_nodes(nodes.size());
  for (std::size_t number = 0; number < nodes.size(); ++number) {
    const PackNode& node = nodes[number];
    const std::uint64_t places = node.length * multiple;
    const std::uint64_t above = node.parent == kNoPackNode ? 0 : of_nodes[node.parent];  // a parent is before it
    of_nodes[number] = above + node.count * (linear * places + places * places);
  }
  for (std::size_t leaf = 0; leaf < leaves.size(); ++leaf) {
    costs[leaf] = static_cast<std::int64_t>(of_nodes[leaves[leaf].node]);
  }
}

void find_costs(std::span<const std::uint64_t> first_packs, std::span<const std::int64_t> leaf_costs,
                std::span<const std::uint64_t> packs, std::span<std::int64_t> costs) {
  for (std::size_t i = 0; i < packs.size(); ++i) {
    // The last leaf that begins at or before the pack, without a branch that could be mispredicted.
    std::size_t leaf = 0;
    for (std::size_t size = first_packs.size(); size > 1;) {
      const std::size_t half = size / 2;
      leaf += first_packs[leaf + half] <= packs[i] ? half : 0;
      size -= half;
    }
    costs[i] = leaf_costs[leaf];
  }
}

void deal_packs(std::span<const std::int64_t> costs, std::size_t num_ranks, std::span<std::int64_t> dealt) {
  std::vector<std::pair<std::int64_t, std::size_t>> packs;  // minus the cost, and the number
  packs.reserve(costs.size());
  for (std::size_t number = 0; number < costs.size(); ++number) {
    packs.emplace_back(-costs[number], number);
  }
  std::sort(packs.begin(), packs.end());
  std::vector<std::pair<std::int64_t, std::size_t>> ranks;  // cost so far, and the number
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    ranks.emplace_back(0, rank);
  }
  for (std::size_t first = 0; first < packs.size(); first += num_ranks) {
    std::sort(ranks.begin(), ranks.end());
    for (std::size_t place = 0; place < num_ranks; ++place) {
      const auto& [minus_cost, number] = packs[first + place];
      auto& [load, rank] = ranks[place];
      load -= minus_cost;
      dealt[first + rank] = static_cast<std::int64_t>(number);
    }
  }
}

}  // namespace trackbed
