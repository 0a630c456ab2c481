#include "trackbed/block_permutation.hpp"

#include <algorithm>
#include <cstddef>

#include "trackbed/parallel.hpp"
#include "trackbed/permute_block.hpp"

namespace trackbed {

namespace {

struct Place {
  std::uint64_t slot;
  std::uint64_t offset;  // in the block of the slot
};

// Position at which a slot starts; the size for the slot after the last one.
std::uint64_t start_of(const BlockPermutation& permutation, std::uint64_t slot) {
  return slot * permutation.block - (slot > permutation.short_slot ? permutation.missing : 0);
}

Place place_of(const BlockPermutation& permutation, std::uint64_t position) {
  if (position >= start_of(permutation, permutation.short_slot + 1)) {
    position += permutation.missing;
  }
  return {position / permutation.block, position % permutation.block};
}

std::uint64_t last_window_of(const BlockPermutation& permutation) {
  return (permutation.blocks.size - 1) / permutation.window;
}

const Permutation& inside_of(const BlockPermutation& permutation, std::uint64_t window) {
  return window == last_window_of(permutation)                   ? permutation.last_window
         : window == permutation.short_slot / permutation.window ? permutation.short_window
                                                                 : permutation.full_window;
}

// Permutes the leading positions that lie in one window, at most 512. Returns their number.
std::size_t permute_run(const BlockPermutation& permutation, std::span<const std::int64_t> positions,
                        std::int64_t* images, PermuteBlock permute_block) {
  constexpr std::size_t kLongest = 512;
  const auto first = static_cast<std::uint64_t>(positions[0]);
  const std::uint64_t window = place_of(permutation, first).slot / permutation.window;
  const std::uint64_t start = start_of(permutation, window * permutation.window);
  const Permutation inside = with_key(inside_of(permutation, window), permutation.window_key + window);
  std::int64_t offsets[kLongest];
  std::int64_t slots[kLongest];
  std::size_t count = 0;
  for (const std::size_t limit = std::min(kLongest, positions.size()); count < limit; ++count) {
    const std::uint64_t offset = static_cast<std::uint64_t>(positions[count]) - start;
    if (offset >= inside.size) {
      break;
    }
    offsets[count] = static_cast<std::int64_t>(offset);
  }
  permute_block(inside, offsets, offsets, count);
  for (std::size_t i = 0; i < count; ++i) {
    const Place place = place_of(permutation, start + static_cast<std::uint64_t>(offsets[i]));
    slots[i] = static_cast<std::int64_t>(place.slot);
    offsets[i] = static_cast<std::int64_t>(place.offset);
  }
  permute_block(permutation.blocks, slots, slots, count);
  for (std::size_t i = 0; i < count; ++i) {
    images[i] = slots[i] * static_cast<std::int64_t>(permutation.block) + offsets[i];
  }
  return count;
}

}  // namespace

BlockPermutation make_block_permutation(std::uint64_t size, std::uint64_t key, std::uint64_t block,
                                        std::uint64_t window) {
  BlockPermutation made{};
  made.size = size;
  made.block = std::min(block, size);
  const std::uint64_t num_blocks = (size - 1) / made.block + 1;
  made.window = std::min(window, num_blocks);
  made.missing = num_blocks * made.block - size;
  made.blocks = make_permutation(num_blocks, key);
  made.short_slot = find_position(made.blocks, num_blocks - 1);
  made.window_key = with_key(made.blocks, ~key).key;
  const std::uint64_t full = made.block * made.window;
  const std::uint64_t last_slot = last_window_of(made) * made.window;
  made.full_window = make_permutation(full, 0);
  made.short_window = make_permutation(full - made.missing, 0);
  made.last_window = make_permutation(size - start_of(made, last_slot), 0);
  return made;
}

std::uint64_t permute(const BlockPermutation& permutation, std::uint64_t position) {
  if (permutation.block == 1) {
    return permute(permutation.blocks, position);
  }
  const std::uint64_t window = place_of(permutation, position).slot / permutation.window;
  const std::uint64_t start = start_of(permutation, window * permutation.window);
  const Permutation inside = with_key(inside_of(permutation, window), permutation.window_key + window);
  const Place place = place_of(permutation, start + permute(inside, position - start));
  return permute(permutation.blocks, place.slot) * permutation.block + place.offset;
}

void permute(const BlockPermutation& permutation, std::span<const std::int64_t> positions,
             std::span<std::int64_t> images, Isa level, int num_threads, Poll& poll) {
  if (permutation.block == 1) {
    permute(permutation.blocks, positions, images, level, num_threads, poll);
    return;
  }
  constexpr std::size_t kTask = std::size_t{1} << 14;
  const PermuteBlock permute_block = permute_block_at(level);
  const auto num_tasks = static_cast<std::int64_t>((positions.size() + kTask - 1) / kTask);
  run_parallel(num_tasks, num_threads, poll, kTask, [&](std::int64_t task) {
    const std::size_t start = static_cast<std::size_t>(task) * kTask;
    const std::size_t stop = std::min(start + kTask, positions.size());
    for (std::size_t i = start; i < stop;) {
      i += permute_run(permutation, positions.subspan(i, stop - i), images.data() + i, permute_block);
    }
  });
}

}  // namespace trackbed
