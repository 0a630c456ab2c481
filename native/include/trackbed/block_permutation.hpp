#pragma once

#include <cstdint>
#include <span>

#include "trackbed/isa.hpp"
#include "trackbed/permutation.hpp"
#include "trackbed/poll.hpp"

namespace trackbed {

// A shuffle of [0, size) with contiguous reads: blocks of `block` samples are permuted, and then the samples of each
// window of `window` consecutive blocks. The last block may be shorter, and is permuted like the others. With block = 1
// this is the permutation of all samples.
//
// Plain data, created only by make_block_permutation. Each slot holds one block. Slot s starts at position s * block,
// or `missing` earlier after the short block.
struct BlockPermutation {
  std::uint64_t size;
  std::uint64_t block;       // in [1, size]
  std::uint64_t window;      // in [1, number of blocks]
  std::uint64_t missing;     // samples that the last block lacks, below `block`
  std::uint64_t short_slot;  // slot of the last block
  std::uint64_t window_key;  // key of the first window; each window has its own key
  Permutation blocks;        // block at each slot
  Permutation full_window;   // samples of a full window; its key is not used
  Permutation short_window;  // samples of the window with the short block
  Permutation last_window;   // samples of the last window, with or without the short block
};

// Requires: size in [1, 2**63), block >= 1, window >= 1. O(1), below 1 us.
BlockPermutation make_block_permutation(std::uint64_t size, std::uint64_t key, std::uint64_t block,
                                        std::uint64_t window);

// Image of `position`. Requires: position in [0, size). O(1).
std::uint64_t permute(const BlockPermutation& permutation, std::uint64_t position);

// Sets each of `images` to the image of the corresponding position; both may be the same array.
// Requires: equal sizes, positions in [0, size), num_threads >= 1. O(N).
void permute(const BlockPermutation& permutation, std::span<const std::int64_t> positions,
             std::span<std::int64_t> images, Isa level, int num_threads, Poll& poll);

}  // namespace trackbed
