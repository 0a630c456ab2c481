#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace trackbed {

// Node of a tree of two-way interleavings, whose leaves are the datasets of a blend.
//
// An inner node distributes its draws between two children. With a = share / 2**64 and p = phase / 2**64, draw j,
// counted from 0, goes to the left child exactly when floor(a (j + 1) + p) > floor(a j + p). It is then draw number
// floor(a j + p) of the left child, or draw number j - floor(a j + p) of the right child.
//
// A leaf has share 0, itself as the right child, and in `phase` the number of draws from its dataset before the stage.
// By the same arithmetic, a walk that reaches a leaf stays there.
struct InterleavingNode {
  std::uint64_t share;
  std::uint64_t phase;
  std::uint32_t left;
  std::uint32_t right;
};

// Draws the phases of all inner nodes of one tree. Each is drawn from a band around 1/2, the widest for which every
// leaf stays within 15/8 draws of its share at every prefix; for the proof see docs/explanation/instant.md.
//
// The root's reach is 0; the reach of a child with share a of its parent is 1 + a * reach(parent). A leaf's band is
// min(1/2, (15/8 - reach / 2) / reach); an inner node's band is the smaller one of its children's. Both are fractions
// of 2**32, with reaches rounded up and bands rounded down. The phase of inner node i, counted from 0, is
// 1/2 - band + 2 * band * word, with word i of the SplitMix64 stream that starts at `key`, as a fraction of 2**64.
// Requires: the block of one stage, whose first num_leaves nodes are the leaves and whose last node is the root if
// there are inner nodes; a Huffman tree, whose reaches are below 3.36. O(nodes).
void draw_phases(std::span<InterleavingNode> nodes, std::size_t num_leaves, std::uint64_t key);

// The stages of a blend of K datasets, with one tree each, stored as consecutive blocks of nodes. Node d of a block is
// the leaf of dataset d; the inner nodes follow, each after its children. Nodes are numbered from the start of their
// block.
struct BlendTrees {
  std::span<const InterleavingNode> nodes;
  std::span<const std::int64_t> first_samples;  // [T] 0, then never decreasing
  std::span<const std::int64_t> first_nodes;    // [T] start of each stage's block
  std::span<const std::uint32_t> roots;         // [T] root of each stage's tree
  // A stage whose ramp has L > 0 samples goes from the tree of the stage before it, which begins at the same sample and
  // so has no samples of its own, to its own tree. Its sample k is drawn from its own tree if ramp_count(k, L) grows
  // there, and is then draw ramp_count(k, L) of that tree; or else draw k - ramp_count(k, L) of the other. The draws
  // from a dataset are those from both trees. The next stage begins at most L samples after it.
  std::span<const std::int64_t> ramps;     // [T] 0 for a stage of constant weights
  std::span<const std::uint32_t> parents;  // [nodes], or [0] without ramps; kNoParent for roots and for unused leaves
};

constexpr std::uint32_t kNoParent = ~std::uint32_t{0};

// Counts the samples drawn from the tree after a ramp among its first k: floor(k^2 / (2 length) + 1/2).
// Requires: k <= length, length >= 1.
std::uint64_t ramp_count(std::uint64_t k, std::uint64_t length);

// Computes the dataset of each position, and its draw number in that dataset, counted from 0.
// Requires: three spans of equal length, positions of at least 0, and trees as described above.
// O(depth of the dataset in its stage's tree) per position, with one 64 by 64 bit multiplication per level. Several
// positions are walked at once, because each walk is a chain of dependent loads and multiplications.
void interleave(const BlendTrees& trees, std::span<const std::int64_t> positions, std::span<std::int32_t> datasets,
                std::span<std::int64_t> draws);

// Counts the draws from each dataset before draw `position` of a stage, including those before the stage.
// Requires: the block of one stage, whose first counts.size() nodes are the leaves; position >= 0. O(nodes).
void interleaving_counts(std::span<const InterleavingNode> nodes, std::uint32_t root, std::int64_t position,
                         std::span<std::int64_t> counts);

}  // namespace trackbed
