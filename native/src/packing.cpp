#include "trackbed/packing.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>

#include "trackbed/permutation.hpp"
#include "trackbed/split_mix.hpp"

namespace trackbed {

namespace {

// A set of numbers in [0, size), in which the smallest at or above another is found: words of bits, and above them
// words that say which of the words below have any.
class NumberSet {
 public:
  explicit NumberSet(std::size_t size) {
    do {
      size = size / 64 + 1;
      levels_.emplace_back(size, 0);
    } while (size > 1);
  }

  void insert(std::size_t number) {
    for (std::vector<std::uint64_t>& level : levels_) {
      level[number / 64] |= std::uint64_t{1} << number % 64;
      number /= 64;
    }
  }

  void remove(std::size_t number) {
    for (std::vector<std::uint64_t>& level : levels_) {
      level[number / 64] &= ~(std::uint64_t{1} << number % 64);
      if (level[number / 64] != 0) {
        return;
      }
      number /= 64;
    }
  }

  // Returns the smallest number of the set that is at least `number`, or 0 if there is none, which no set here has.
  std::size_t at_least(std::size_t number) const {
    for (std::size_t height = 0; height < levels_.size(); ++height) {
      const std::vector<std::uint64_t>& level = levels_[height];
      const std::size_t word = number / 64;
      const std::uint64_t bits = word < level.size() ? level[word] & ~std::uint64_t{0} << number % 64 : 0;
      if (bits != 0) {
        std::size_t found = word * 64 + static_cast<std::size_t>(std::countr_zero(bits));
        while (height > 0) {
          --height;
          found = found * 64 + static_cast<std::size_t>(std::countr_zero(levels_[height][found]));
        }
        return found;
      }
      number = word + 1;
    }
    return 0;
  }

 private:
  std::vector<std::vector<std::uint64_t>> levels_;
};

// Groups of packs by the room that they have, those of one room first in, first out.
class OpenGroups {
 public:
  explicit OpenGroups(std::size_t capacity)
      : rooms_(capacity + 1), first_(capacity + 1, kNoPackNode), last_(capacity + 1, kNoPackNode) {}

  // Returns the smallest room of a group that is at least `length`, or 0.
  std::size_t room_for(std::size_t length) const { return rooms_.at_least(length); }

  std::uint32_t first_of(std::size_t room) const { return first_[room]; }

  // Adds group `node`, the newest, with a room of at least 1.
  void add(std::uint32_t node, std::size_t room) {
    next_.resize(node + std::size_t{1}, kNoPackNode);
    if (first_[room] == kNoPackNode) {
      first_[room] = node;
      rooms_.insert(room);
    } else {
      next_[last_[room]] = node;
    }
    last_[room] = node;
  }

  void remove_first(std::size_t room) {
    first_[room] = next_[first_[room]];
    if (first_[room] == kNoPackNode) {
      rooms_.remove(room);
    }
  }

 private:
  NumberSet rooms_;
  std::vector<std::uint32_t> first_;
  std::vector<std::uint32_t> last_;
  std::vector<std::uint32_t> next_;
};

// Items of a document, in units of length: `num_whole` that fill a pack, and one of `rest`, if that is above 0.
struct Items {
  std::uint64_t num_whole;
  std::uint64_t rest;
};

Items items_of(std::int32_t num_tokens, const PackShape& shape) {
  if (num_tokens < 2) {
    return {0, 0};
  }
  const std::uint64_t places = static_cast<std::uint64_t>(num_tokens) - 1;
  if (places <= shape.sequence_length) {
    return {0, (places + shape.multiple - 1) / shape.multiple};
  }
  switch (shape.long_documents) {
    case LongDocuments::kSplit: {
      const std::uint64_t rest = places % shape.sequence_length;
      return {places / shape.sequence_length, (rest + shape.multiple - 1) / shape.multiple};
    }
    case LongDocuments::kCut:
      return {1, 0};
    case LongDocuments::kDrop:
      break;
  }
  return {0, 0};
}

// The piece of a document that an item is. The items of a whole pack's length that belong to one document are
// consecutive; `number` says which of them it is, and is not used for shorter items.
PackedPiece piece_of(std::int64_t document, std::int32_t num_tokens, std::uint64_t number, bool fills_pack,
                     const PackShape& shape) {
  const std::uint64_t places = static_cast<std::uint64_t>(num_tokens) - 1;
  // A shorter item is the rest of its document: behind the whole packs, if there are any.
  const std::uint64_t piece = fills_pack ? number : places / shape.sequence_length;
  const std::uint64_t start = piece * shape.sequence_length;
  const std::uint64_t stop = std::min(places, start + shape.sequence_length);
  return {document, static_cast<std::int64_t>(start), static_cast<std::int64_t>(stop)};
}

}  // namespace

PackPlan plan_packs(std::span<const std::uint64_t> counts, std::uint64_t most_items) {
  struct Packs {
    std::uint64_t all;
    std::uint64_t taken;  // by groups below
  };
  const std::size_t capacity = counts.size() - 1;
  PackPlan plan;
  std::vector<Packs> packs;
  OpenGroups open(capacity);
  for (std::size_t length = capacity; length > 0; --length) {
    std::uint64_t placed = 0;
    // Adds a group of packs that take `count` items of this length each.
    const auto add = [&](std::uint32_t parent, std::size_t room, std::uint64_t count, std::uint64_t num_packs) {
      const auto node = static_cast<std::uint32_t>(plan.nodes.size());
      std::uint64_t& first = parent == kNoPackNode ? plan.num_packs : packs[parent].taken;
      const std::uint64_t num_items = count + (parent == kNoPackNode ? 0 : plan.nodes[parent].num_items);
      plan.nodes.push_back({parent == kNoPackNode ? 0 : first, placed, parent, static_cast<std::uint32_t>(length),
                            static_cast<std::uint32_t>(count), static_cast<std::uint32_t>(num_items)});
      first += num_packs;
      placed += num_packs * count;
      packs.push_back({num_packs, 0});
      const std::size_t rest = room - count * length;
      if (rest > 0 && num_items < most_items) {
        open.add(node, rest);
      }
    };
    while (placed < counts[length]) {
      const std::size_t found = open.room_for(length);
      const bool is_new = found == 0;
      const std::size_t room = is_new ? capacity : found;
      const std::uint32_t parent = is_new ? kNoPackNode : open.first_of(room);
      const std::uint64_t available = is_new ? ~std::uint64_t{0} : packs[parent].all - packs[parent].taken;
      const std::uint64_t before = is_new ? 0 : plan.nodes[parent].num_items;
      const std::uint64_t most = std::min<std::uint64_t>(room / length, most_items - before);
      const std::uint64_t full = std::min(available, (counts[length] - placed) / most);
      if (full > 0) {
        add(parent, room, most, full);
      }
      const std::uint64_t left = counts[length] - placed;
      if (full < available && left > 0) {  // fewer than `most`
        add(parent, room, left, 1);
      }
      if (!is_new && packs[parent].taken == packs[parent].all) {
        open.remove_first(room);
      }
    }
  }
  std::uint64_t first_pack = 0;
  for (std::size_t node = 0; node < packs.size(); ++node) {
    if (packs[node].taken < packs[node].all) {
      plan.leaves.push_back({first_pack, packs[node].taken, node});
      first_pack += packs[node].all - packs[node].taken;
    }
  }
  return plan;
}

void count_items(std::span<const std::int32_t> lengths, const PackShape& shape, std::span<std::uint64_t> counts) {
  std::fill(counts.begin(), counts.end(), 0);
  for (const std::int32_t length : lengths) {
    const Items items = items_of(length, shape);
    counts[items.rest] += 1;
    counts.back() += items.num_whole;
  }
  counts[0] = 0;
}

void sort_items(std::span<const std::int32_t> lengths, const PackShape& shape, std::span<const std::uint64_t> counts,
                std::span<std::uint32_t> documents) {
  std::vector<std::uint64_t> next(counts.size(), 0);
  for (std::size_t length = 1; length < counts.size(); ++length) {
    next[length] = next[length - 1] + counts[length - 1];
  }
  for (std::size_t document = 0; document < lengths.size(); ++document) {
    const Items items = items_of(lengths[document], shape);
    for (std::uint64_t piece = 0; piece < items.num_whole; ++piece) {
      documents[next.back()++] = static_cast<std::uint32_t>(document);
    }
    if (items.rest > 0) {
      documents[next[items.rest]++] = static_cast<std::uint32_t>(document);
    }
  }
}

void find_pack(const PackTables& tables, const PackShape& shape, std::uint64_t pack, std::uint64_t key,
               std::vector<PackedPiece>& pieces) {
  const std::size_t capacity = tables.first_items.size() - 2;
  const auto after =
      std::upper_bound(tables.leaves.begin(), tables.leaves.end(), pack,
                       [](std::uint64_t wanted, const PackLeaf& leaf) { return wanted < leaf.first_pack; });
  const PackLeaf& leaf = *(after - 1);
  std::uint64_t place = pack - leaf.first_pack + leaf.first_of_node;  // of the pack in its group
  const std::size_t first_piece = pieces.size();
  for (auto number = static_cast<std::uint32_t>(leaf.node); number != kNoPackNode;) {
    const PackNode& node = tables.nodes[number];
    const std::uint64_t first = tables.first_items[node.length];
    const std::uint64_t num_items = tables.first_items[node.length + 1] - first;
    const Permutation shuffle = make_permutation(num_items, split_mix(key, node.length));
    for (std::uint32_t i = node.count; i > 0; --i) {
      const std::uint64_t item = first + permute(shuffle, node.first_item + place * node.count + i - 1);
      const std::uint32_t document = tables.documents[item];
      const bool fills_pack = node.length == capacity;
      std::uint64_t of_document = 0;
      if (fills_pack) {
        const auto begin = tables.documents.begin() + static_cast<std::ptrdiff_t>(first);
        const auto here = tables.documents.begin() + static_cast<std::ptrdiff_t>(item);
        of_document = static_cast<std::uint64_t>(here - std::lower_bound(begin, here, document));
      }
      pieces.push_back(piece_of(document, tables.lengths[document], of_document, fills_pack, shape));
    }
    place += node.first_pack;
    number = node.parent;
  }
  std::reverse(pieces.begin() + static_cast<std::ptrdiff_t>(first_piece), pieces.end());
}

}  // namespace trackbed
