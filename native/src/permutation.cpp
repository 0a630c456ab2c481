#include "trackbed/permutation.hpp"

#include <algorithm>
#include <cstddef>

#include "trackbed/parallel.hpp"
#include "trackbed/permute_block.hpp"

namespace trackbed {

namespace {

// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection in which every bit affects all bits.
std::uint64_t mix(std::uint64_t bits) {
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
  return bits ^ bits >> 31;
}

// The smallest number whose square is at least `number`.
std::uint64_t ceil_sqrt(std::uint64_t number) {
  std::uint64_t root = 0;  // the largest number whose square is below `number`, computed bit by bit
  for (std::uint64_t bit = std::uint64_t{1} << 31; bit > 0; bit >>= 1) {
    if ((root | bit) * (root | bit) < number) {
      root |= bit;
    }
  }
  return root + 1;
}

// Two positions in one row keep their distance while their rows coincide in every second round, each time with
// probability 1 / rows. The number of rounds makes this undetectable: see docs/explanation/permutation.md.
std::uint64_t rounds_for(std::uint64_t size) {
  return size < 1 << 4 ? 32 : size < 1 << 6 ? 16 : size < 1 << 10 ? 10 : size < 1 << 20 ? 8 : 6;
}

}  // namespace

Permutation make_permutation(std::uint64_t size, std::uint64_t key) {
  // Rotating a column with an odd number of rows is an even permutation. If both sides were odd, only half of all
  // permutations would be possible.
  const std::uint64_t root = ceil_sqrt(size);
  const std::uint64_t rows = size == 1 ? 1 : root + root % 2;
  const std::uint64_t columns = (size - 1) / rows + 1;
  return with_key({size, rows, columns, ~std::uint64_t{0} / columns, 0, rounds_for(size)}, key);
}

Permutation with_key(Permutation permutation, std::uint64_t key) {
  // Includes the size, because permutations of two sizes with the same grid must not be nearly equal.
  permutation.key = mix(mix(permutation.size + permutation::kMultiplier) ^ key);
  return permutation;
}

std::uint64_t find_position(const Permutation& permutation, std::uint64_t image) {
  using permutation::kNextKey;
  do {
    permutation::Cell cell = permutation::cell_of(permutation, image);
    for (std::uint64_t round = permutation.rounds; round > 0; round -= 2) {
      const std::uint64_t key = permutation.key + (round - 2) * kNextKey;
      const std::uint64_t right = permutation::hash(cell.row, key + kNextKey, permutation.columns);
      cell.column = permutation::wrapped(cell.column + permutation.columns - right, permutation.columns);
      const std::uint64_t down = permutation::hash(cell.column, key, permutation.rows);
      cell.row = permutation::wrapped(cell.row + permutation.rows - down, permutation.rows);
    }
    image = cell.row * permutation.columns + cell.column;
  } while (image >= permutation.size);
  return image;
}

void permute(const Permutation& permutation, std::span<const std::int64_t> positions, std::span<std::int64_t> images,
             Isa level, int num_threads, Poll& poll) {
  constexpr std::size_t kTask = std::size_t{1} << 16;
  const PermuteBlock permute_block = permute_block_at(level);
  const auto num_tasks = static_cast<std::int64_t>((positions.size() + kTask - 1) / kTask);
  run_parallel(num_tasks, num_threads, poll, kTask, [&](std::int64_t task) {
    const std::size_t start = static_cast<std::size_t>(task) * kTask;
    const std::size_t count = std::min(kTask, positions.size() - start);
    permute_block(permutation, positions.data() + start, images.data() + start, count);
  });
}

}  // namespace trackbed
