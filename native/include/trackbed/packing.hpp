#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "trackbed/sample_spans.hpp"

// Packs: groups of items whose lengths add up to at most a capacity, by best-fit decreasing.
//
// The longest item comes first, and each goes into the pack with the least room in which it fits. Items of one length
// are alike, and so are packs that hold the same lengths. So the histogram of lengths is packed instead of the items,
// whole groups of packs at a time; the number of packs is that of packing item by item. The plan takes as long for
// 10^9 items as for 10^6.
//
// An item is a document, or a piece of one that is longer than a pack. A document of n tokens has n - 1 places: its
// inputs are tokens 0 to n - 2, and its labels tokens 1 to n - 1. Lengths are counted in units of `multiple` places,
// and those of an item are rounded up.

namespace trackbed {

constexpr std::uint32_t kNoPackNode = ~std::uint32_t{0};

// A group of packs with the same items up to some length. Those of its packs that take shorter items as well are in the
// groups below it, one after the other from its first pack on; the others are a leaf.
struct PackNode {
  std::uint64_t first_pack;  // its first pack, among those of the group above
  std::uint64_t first_item;  // the first of its items, among those of its length
  std::uint32_t parent;      // the group above, or kNoPackNode
  std::uint32_t length;      // that of its items
  std::uint32_t count;       // of its items in each pack
  std::uint32_t num_items;   // in each pack, with those of the groups above
};

// The packs of a group that take no shorter items.
struct PackLeaf {
  std::uint64_t first_pack;     // among all packs
  std::uint64_t first_of_node;  // the same pack among those of its group
  std::uint64_t node;
};

struct PackPlan {
  std::vector<PackNode> nodes;
  std::vector<PackLeaf> leaves;
  std::uint64_t num_packs = 0;
};

// Packs counts[l] items of each length l in [1, capacity], where capacity + 1 is the number of counts.
// Requires: most_items >= 1. O(capacity + nodes), independent of the number of items.
PackPlan plan_packs(std::span<const std::uint64_t> counts, std::uint64_t most_items);

// What becomes of a document that does not fit into a pack.
enum class LongDocuments : int {
  kSplit = 0,  // pieces of a whole pack each, and the rest
  kCut = 1,    // its beginning
  kDrop = 2,   // it is left out
};

struct PackShape {
  std::uint64_t sequence_length;  // places of a pack, a multiple of the next
  std::uint64_t multiple;         // places in a unit of length
  LongDocuments long_documents;
};

// Counts the items of each length; counts has sequence_length / multiple + 1 entries, the first of which is 0.
// `lengths` are the tokens of the documents. A document of fewer than two tokens has no item.
void count_items(std::span<const std::int32_t> lengths, const PackShape& shape, std::span<std::uint64_t> counts);

// Lists the documents of the items in rising order of length, and those of one length in rising order; `counts` are
// those of count_items. Requires: as many documents as items, and at most 2**32 lengths.
void sort_items(std::span<const std::int32_t> lengths, const PackShape& shape, std::span<const std::uint64_t> counts,
                std::span<std::uint32_t> documents);

struct PackTables {
  std::span<const PackNode> nodes;
  std::span<const PackLeaf> leaves;
  std::span<const std::uint64_t> first_items;  // the first item of each length in `documents`; one more than counts
  std::span<const std::uint32_t> documents;    // from sort_items
  std::span<const std::int32_t> lengths;       // tokens of the documents
};

// Appends the pieces of a pack in falling order of their lengths. The items of one length are permuted by a key, so
// that documents meet others under each key. Requires: pack is below the number of packs. O(log leaves + pieces).
void find_pack(const PackTables& tables, const PackShape& shape, std::uint64_t pack, std::uint64_t key,
               std::vector<PackedPiece>& pieces);

}  // namespace trackbed
