#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace trackbed {

// One node of a tree of two-way interleavings, whose leaves are the datasets of a blend.
//
// An inner node shares its draws out between two children: with a = share / 2**64 and p = phase / 2**64, it sends its
// j-th draw, from 0 on, left exactly when floor(a (j + 1) + p) > floor(a j + p). That draw is number floor(a j + p) on
// the left, or j less that number on the right.
//
// A leaf has the share 0, itself as the right child, and in `phase` how often its dataset was drawn before the stage:
// by the same arithmetic, a walk that has come to a leaf stays there.
struct InterleavingNode {
  std::uint64_t share;
  std::uint64_t phase;
  std::uint32_t left;
  std::uint32_t right;
};

// Draws the phases of all inner nodes of one tree, each from a band around 1/2 that is as wide as can be, so that every
// leaf stays within 15/8 draws of its share at every prefix. docs/explanation/instant.md says why it does.
//
// The root's reach is 0, and that of a child with the share a of its parent is 1 + a * reach(parent). A leaf's band is
// min(1/2, (15/8 - reach / 2) / reach), that of an inner node the lesser of its children's: fractions of 2**32, reaches
// rounded up and bands down. The phase of inner node i, from 0 on, is 1/2 - band + 2 * band * word, with word i of the
// SplitMix64 stream that starts at `key`, as a fraction of 2**64.
// Requires: one stage's block, of which the first num_leaves nodes are the leaves and the last one is the root, or one
// without inner nodes; a Huffman tree, whose reaches are below 3.36. O(nodes).
void draw_phases(std::span<InterleavingNode> nodes, std::size_t num_leaves, std::uint64_t key);

// The stages of a blend of K datasets: a tree each, one block of nodes after the other. Node d of a block is the leaf
// of dataset d; the inner nodes follow, each after its children. Nodes of a block are numbered from the block's
// beginning.
struct BlendTrees {
  std::span<const InterleavingNode> nodes;
  std::span<const std::int64_t> first_samples;  // [T] from 0 on, never decreasing
  std::span<const std::int64_t> first_nodes;    // [T] where each stage's block begins
  std::span<const std::uint32_t> roots;         // [T] which node of its block every draw of the stage enters
};

// From which dataset each position's sample comes, and the how manieth draw of that dataset it is, from 0 on.
// Requires: all three spans of one length, positions of at least 0, and trees as described above.
// O(depth of the dataset in its stage's tree) a position, one multiplication of 64 by 64 bits on every level; a few
// positions are walked at once, as each of them is a chain of loads and products that wait for each other.
void interleave(const BlendTrees& trees, std::span<const std::int64_t> positions, std::span<std::int32_t> datasets,
                std::span<std::int64_t> draws);

// How often each dataset is drawn before the `position`-th draw of a stage, counted with what was drawn before it.
// Requires: one stage's block, of which the first counts.size() nodes are the leaves; position >= 0. O(nodes).
void interleaving_counts(std::span<const InterleavingNode> nodes, std::uint32_t root, std::int64_t position,
                         std::span<std::int64_t> counts);

}  // namespace trackbed
