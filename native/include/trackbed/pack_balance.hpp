#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "trackbed/packing.hpp"

// Packs of equal cost for every rank.
//
// The cost of a pack is the sum of `linear * n + n * n` over its items of n places: the work of a model on them, in
// units of one pair of tokens in attention. Whole numbers, so that all ranks find the same assignment.

namespace trackbed {

// Finds the cost of the packs of each leaf; n is the length of an item in units times `multiple`.
// Requires: as many costs as leaves, and costs below 2**63. O(nodes).
void leaf_costs(std::span<const PackNode> nodes, std::span<const PackLeaf> leaves, std::uint64_t multiple,
                std::uint64_t linear, std::span<std::int64_t> costs);

// Looks up the cost of each of some packs; `first_packs` are those of the leaves, which rise from 0 on.
// Requires: `first_packs` and `leaf_costs` of one size, `packs` and `costs` of one size; without leaves no packs.
// O(packs * log(leaves)).
void find_costs(std::span<const std::uint64_t> first_packs, std::span<const std::int64_t> leaf_costs,
                std::span<const std::uint64_t> packs, std::span<std::int64_t> costs);

// Deals packs to ranks: packs are sorted by falling cost, those of one cost by number, and of each `num_ranks`
// neighbours the heaviest goes to the rank with the least so far, of several such ranks to the first one.
// `dealt[turn * num_ranks + rank]` is the number of the pack that a rank gets in a turn.
// Requires: `num_ranks` divides the number of packs, and the costs of a rank add up to less than 2**63.
// O(packs * log(packs)).
void deal_packs(std::span<const std::int64_t> costs, std::size_t num_ranks, std::span<std::int64_t> dealt);

}  // namespace trackbed
