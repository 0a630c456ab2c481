#include "trackbed/interleaving.hpp"

#include <algorithm>
#include <vector>

namespace trackbed {

namespace {

__extension__ typedef unsigned __int128 Product;

// Number of positions walked at once.
constexpr std::size_t kLanes = 8;

struct Walk {
  const InterleavingNode* block;
  std::uint64_t ordinal;
  std::uint32_t node;
};

// Descends one level, without a branch. Returns 0 at a leaf.
inline std::uint64_t descend(Walk& walk) {
  const InterleavingNode& node = walk.block[walk.node];
  const Product product = Product{node.share} * walk.ordinal + node.phase;
  const auto floor = static_cast<std::uint64_t>(product >> 64);
  const auto fraction = static_cast<std::uint64_t>(product);
  // The fraction of the sum is smaller than a summand exactly when the floor increases. Masks, because compilers turn a
  // conditional into an unpredictable branch here.
  const std::uint64_t right = fraction + node.share < fraction ? 0 : ~std::uint64_t{0};
  walk.ordinal = (floor & ~right) | ((walk.ordinal - floor) & right);
  walk.node = node.left ^ ((node.left ^ node.right) & static_cast<std::uint32_t>(right));
  return node.share;
}

// Finds the last stage that begins at or before a position. Most positions are in the stage of the previous one.
class StageFinder {
 public:
  explicit StageFinder(std::span<const std::int64_t> first_samples) : first_samples_(first_samples) {}

  std::size_t operator()(std::int64_t position) {
    const bool is_later = stage_ + 1 < first_samples_.size() && first_samples_[stage_ + 1] <= position;
    if (is_later || first_samples_[stage_] > position) {
      const auto after = std::upper_bound(first_samples_.begin(), first_samples_.end(), position);
      stage_ = static_cast<std::size_t>(after - first_samples_.begin()) - 1;
    }
    return stage_;
  }

 private:
  std::span<const std::int64_t> first_samples_;
  std::size_t stage_ = 0;
};

// The tree of a ramp from which a position is not drawn, and how many samples are drawn from it before the position.
struct OtherTree {
  const InterleavingNode* block = nullptr;
  const std::uint32_t* parents = nullptr;
  std::uint32_t root = 0;
  std::uint64_t draws = 0;
};

// Counts the draws from a dataset among the first ones of a tree, with those before the stage. Draws are distributed
// along the path from the root to its leaf, which `path` receives from the leaf upwards.
std::uint64_t count_of(const OtherTree& tree, std::uint32_t dataset, std::vector<std::uint32_t>& path) {
  path.clear();
  for (std::uint32_t node = dataset; node != kNoParent; node = tree.parents[node]) {
    path.push_back(node);
  }
  if (path.back() != tree.root) {
    return tree.block[dataset].phase;  // a dataset of weight 0
  }
  std::uint64_t draws = tree.draws;
  for (std::size_t i = path.size() - 1; i > 0; --i) {
    const InterleavingNode& node = tree.block[path[i]];
    const auto left = static_cast<std::uint64_t>((Product{node.share} * draws + node.phase) >> 64);
    draws = path[i - 1] == node.left ? left : draws - left;
  }
  return draws + tree.block[dataset].phase;
}

// Sets the tree and the draw of it at sample `walk.ordinal` of a ramp. Returns the other tree.
OtherTree enter_ramp(const BlendTrees& trees, std::size_t stage, Walk& walk) {
  const auto length = static_cast<std::uint64_t>(trees.ramps[stage]);
  const std::uint64_t sample = walk.ordinal;
  const std::uint64_t after = ramp_count(sample, length);
  const std::uint64_t before = sample - after;
  const bool is_after = ramp_count(sample + 1, length) > after;
  const std::size_t own = is_after ? stage : stage - 1;
  const std::size_t other = is_after ? stage - 1 : stage;
  walk = {trees.nodes.data() + trees.first_nodes[own], is_after ? after : before, trees.roots[own]};
  const std::int64_t first = trees.first_nodes[other];
  return {trees.nodes.data() + first, trees.parents.data() + first, trees.roots[other], is_after ? before : after};
}

// Walks `count` positions at once, at most kLanes; unused lanes repeat the first one.
void walk_lanes(const BlendTrees& trees, StageFinder& stage_of, const std::int64_t* positions, std::size_t count,
                std::int32_t* datasets, std::int64_t* draws, std::vector<std::uint32_t>& path) {
  Walk walks[kLanes];
  OtherTree others[kLanes];
  bool is_in_ramp = false;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const std::int64_t position = positions[lane < count ? lane : 0];
    const std::size_t stage = stage_of(position);
    walks[lane].block = trees.nodes.data() + trees.first_nodes[stage];
    walks[lane].ordinal = static_cast<std::uint64_t>(position - trees.first_samples[stage]);
    walks[lane].node = trees.roots[stage];
    if (trees.ramps[stage] > 0) {
      others[lane] = enter_ramp(trees, stage, walks[lane]);
      is_in_ramp = true;
    }
  }
  std::uint64_t shares = 0;
  do {
    shares = 0;
    for (Walk& walk : walks) {
      shares |= descend(walk);
    }
  } while (shares != 0);
  for (std::size_t lane = 0; lane < count; ++lane) {
    const Walk& walk = walks[lane];
    datasets[lane] = static_cast<std::int32_t>(walk.node);
    draws[lane] = static_cast<std::int64_t>(walk.ordinal + walk.block[walk.node].phase);
  }
  for (std::size_t lane = 0; is_in_ramp && lane < count; ++lane) {
    if (others[lane].block != nullptr) {
      draws[lane] += static_cast<std::int64_t>(count_of(others[lane], walks[lane].node, path));
    }
  }
}

}  // namespace

std::uint64_t ramp_count(std::uint64_t k, std::uint64_t length) {
  return static_cast<std::uint64_t>((Product{k} * k + length) / (Product{length} * 2));
}

void interleave(const BlendTrees& trees, std::span<const std::int64_t> positions, std::span<std::int32_t> datasets,
                std::span<std::int64_t> draws) {
  StageFinder stage_of(trees.first_samples);
  std::vector<std::uint32_t> path;
  for (std::size_t i = 0; i < positions.size(); i += kLanes) {
    const std::size_t count = std::min(kLanes, positions.size() - i);
    walk_lanes(trees, stage_of, positions.data() + i, count, datasets.data() + i, draws.data() + i, path);
  }
}

void interleaving_counts(std::span<const InterleavingNode> nodes, std::uint32_t root, std::int64_t position,
                         std::span<std::int64_t> counts) {
  std::vector<std::uint64_t> ordinals(nodes.size(), 0);
  ordinals[root] = static_cast<std::uint64_t>(position);
  for (std::size_t i = nodes.size(); i-- > counts.size();) {
    const InterleavingNode& node = nodes[i];
    const auto left = static_cast<std::uint64_t>((Product{node.share} * ordinals[i] + node.phase) >> 64);
    ordinals[node.left] = left;
    ordinals[node.right] = ordinals[i] - left;
  }
  for (std::size_t dataset = 0; dataset < counts.size(); ++dataset) {
    counts[dataset] = static_cast<std::int64_t>(ordinals[dataset] + nodes[dataset].phase);
  }
}

}  // namespace trackbed
