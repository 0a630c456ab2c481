#pragma once

#include <cstdint>
#include <span>

#include "trackbed/isa.hpp"
#include "trackbed/permutation.hpp"
#include "trackbed/poll.hpp"

namespace trackbed {

// A shuffle of [0, size) that reads contiguously: blocks of `block` samples are permuted, and then, in each window of
// `window` blocks that come one after the other, their samples. The last block may be shorter; it moves like the
// others. With block = 1 it is the permutation of all samples itself.
//
// Plain data, filled by make_block_permutation alone. A block stands at a slot; slot s starts at position s * block,
// less `missing` after the short block.
struct BlockPermutation {
  std::uint64_t size;
  std::uint64_t block;       // in [1, size]
  std::uint64_t window;      // in [1, number of blocks]
  std::uint64_t missing;     // by how many samples the last block is shorter, below `block`
  std::uint64_t short_slot;  // at which slot the last block stands
  std::uint64_t window_key;  // of the first window; each has a key of its own
  Permutation blocks;        // which block stands at each slot
  Permutation full_window;   // the samples of a window; its key does not matter
  Permutation short_window;  // of the window with the short block
  Permutation last_window;   // of the last window, the short block in it or not
};

// Requires: size in [1, 2**63), block >= 1, window >= 1. O(1), below 1 us.
BlockPermutation make_block_permutation(std::uint64_t size, std::uint64_t key, std::uint64_t block,
                                        std::uint64_t window);

// What comes at `position`. Requires: position in [0, size). O(1).
std::uint64_t permute(const BlockPermutation& permutation, std::uint64_t position);

// Sets each of `images` to what the permutation makes of the position at the same place; both may be one array.
// Requires: equal sizes, positions in [0, size), num_threads >= 1. O(N).
void permute(const BlockPermutation& permutation, std::span<const std::int64_t> positions,
             std::span<std::int64_t> images, Isa level, int num_threads, Poll& poll);

}  // namespace trackbed
