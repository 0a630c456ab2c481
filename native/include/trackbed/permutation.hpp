#pragma once

#include <cstdint>
#include <span>

#include "trackbed/isa.hpp"
#include "trackbed/poll.hpp"

// A keyed bijection of [0, size), computed on demand instead of stored.
//
// It is a Feistel network on a grid of rows x columns cells, the smallest of about square shape that holds `size`: a
// cell's row is shifted by a hash of its column, then its column by a hash of its row, and so on. Each step is
// invertible, so the network is a bijection of the cells. A cell outside of [0, size) is permuted again until it is
// inside (cycle walking).
//
// All arithmetic is in integers, so the result is equal on every platform and at every instruction level. It never
// changes within a version.

namespace trackbed {

constexpr int kPermutationVersion = 1;

// Plain data, created only by make_permutation and with_key.
struct Permutation {
  std::uint64_t size;        // in [1, 2**63)
  std::uint64_t rows;        // ceil(sqrt(size)), or one more to be even; below 2**32
  std::uint64_t columns;     // ceil(size / rows), below 2**32
  std::uint64_t reciprocal;  // (2**64 - 1) / columns
  std::uint64_t key;         // hash of the given key and the size
  std::uint64_t rounds;      // even; a small grid needs more rounds to mix well
};

// Requires: size in [1, 2**63). O(1), below 0.2 us.
Permutation make_permutation(std::uint64_t size, std::uint64_t key);

// make_permutation(permutation.size, key), in a few nanoseconds.
Permutation with_key(Permutation permutation, std::uint64_t key);

// The inverse: the position for which permute(permutation, position) is `image`. Requires: image in [0, size).
std::uint64_t find_position(const Permutation& permutation, std::uint64_t image);

// Sets each of `images` to the image of the corresponding position; both may be the same array.
// Requires: equal sizes, positions in [0, size), num_threads >= 1. O(N).
void permute(const Permutation& permutation, std::span<const std::int64_t> positions, std::span<std::int64_t> images,
             Isa level, int num_threads, Poll& poll);

// The functions below are always inlined: files compiled per level use them too, and must not emit copies that the
// linker could pick.
namespace permutation {

__extension__ typedef unsigned __int128 Product;

struct Cell {
  std::uint64_t row;
  std::uint64_t column;
};

constexpr std::uint64_t kMultiplier = 0x9e3779b97f4a7c15;  // odd and without structure, as are the next two
constexpr std::uint64_t kFinalMultiplier = 0xd6e8feb86659fd93;
constexpr std::uint64_t kNextKey = 0xbf58476d1ce4e5b9;

[[gnu::always_inline]] inline std::uint64_t multiply_high(std::uint64_t a, std::uint64_t b) {
  return static_cast<std::uint64_t>(static_cast<Product>(a) * b >> 64);
}

// Hash of a coordinate and a round's key to [0, bound).
[[gnu::always_inline]] inline std::uint64_t hash(std::uint64_t coordinate, std::uint64_t key, std::uint64_t bound) {
  std::uint64_t bits = coordinate * kMultiplier + key;
  bits ^= bits >> 32;
  return multiply_high(bits * kFinalMultiplier, bound);
}

[[gnu::always_inline]] inline std::uint64_t wrapped(std::uint64_t coordinate, std::uint64_t bound) {
  return coordinate < bound ? coordinate : coordinate - bound;
}

[[gnu::always_inline]] inline Cell cell_of(const Permutation& grid, std::uint64_t position) {
  // At most 1 too small, because size / 2**64 < 1 / 2.
  const std::uint64_t row = multiply_high(position, grid.reciprocal);
  const std::uint64_t column = position - row * grid.columns;
  return column < grid.columns ? Cell{row, column} : Cell{row + 1, column - grid.columns};
}

// One pass through all rounds: a bijection of the grid's cells, some of which lie outside of [0, size).
[[gnu::always_inline]] inline std::uint64_t pass(const Permutation& grid, std::uint64_t position) {
  Cell cell = cell_of(grid, position);
  std::uint64_t key = grid.key;
  for (std::uint64_t round = 0; round < grid.rounds; round += 2) {
    cell.row = wrapped(cell.row + hash(cell.column, key, grid.rows), grid.rows);
    cell.column = wrapped(cell.column + hash(cell.row, key + kNextKey, grid.columns), grid.columns);
    key += 2 * kNextKey;
  }
  return cell.row * grid.columns + cell.column;
}

}  // namespace permutation

// Image of `position`. Requires: position in [0, size). The expected number of passes is below 1.5, and near 1 for all
// but the smallest sizes, because fewer than `rows` cells lie outside.
[[gnu::always_inline]] inline std::uint64_t permute(const Permutation& permutation, std::uint64_t position) {
  do {
    position = permutation::pass(permutation, position);
  } while (position >= permutation.size);
  return position;
}

}  // namespace trackbed
