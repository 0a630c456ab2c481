#include "trackbed/epoch_samples.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "trackbed/block_permutation.hpp"
#include "trackbed/split_mix.hpp"

namespace trackbed {

namespace {

// Number of interleaved draws.
constexpr std::size_t kLanes = 8;

struct EpochDraw {
  std::uint64_t epoch;
  std::uint64_t position;  // position in the epoch
};

EpochDraw epoch_draw(std::uint64_t draw, std::uint64_t size) {
  // Most draws are of the first epoch, and a division takes as long as two permutation rounds.
  const std::uint64_t epoch = draw < size ? 0 : draw / size;
  return {epoch, draw - epoch * size};
}

// permutation::wrapped as the smaller of two numbers, as a difference below 0 is a large one. Of a comparison with the
// bound, Clang makes a branch in the loops below, which takes three times as long.
inline std::uint64_t wrapped(std::uint64_t coordinate, std::uint64_t bound) {
  return std::min(coordinate, coordinate - bound);
}

// permute() for `count` draws at once, at most kLanes; unused lanes repeat the first one. All lanes run through the
// largest number of rounds of any lane; lanes with fewer rounds keep their value in the remaining ones.
void permute_lanes(const EpochShuffles& shuffles, const std::int32_t* datasets, const std::int64_t* draws,
                   std::size_t count, std::int64_t* samples) {
  using permutation::Cell;
  using permutation::hash;
  using permutation::kNextKey;
  Permutation grids[kLanes];
  Cell cells[kLanes];
  std::uint64_t most_rounds = 0;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const std::size_t from = lane < count ? lane : 0;
    const auto dataset = static_cast<std::size_t>(datasets[from]);
    const Permutation& any_epoch = shuffles.permutations[dataset];
    const EpochDraw draw = epoch_draw(static_cast<std::uint64_t>(draws[from]), any_epoch.size);
    grids[lane] = with_key(any_epoch, split_mix(shuffles.keys[dataset], draw.epoch));
    cells[lane] = permutation::cell_of(any_epoch, draw.position);
    most_rounds = any_epoch.rounds > most_rounds ? any_epoch.rounds : most_rounds;
  }
  for (std::uint64_t round = 0; round < most_rounds; round += 2) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const Permutation& grid = grids[lane];
      Cell& cell = cells[lane];
      const std::uint64_t down = hash(cell.column, grid.key + round * kNextKey, grid.rows);
      const std::uint64_t row = wrapped(cell.row + down, grid.rows);
      cell.row = round < grid.rounds ? row : cell.row;
    }
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const Permutation& grid = grids[lane];
      Cell& cell = cells[lane];
      const std::uint64_t right = hash(cell.row, grid.key + (round + 1) * kNextKey, grid.columns);
      const std::uint64_t column = wrapped(cell.column + right, grid.columns);
      cell.column = round < grid.rounds ? column : cell.column;
    }
  }
  for (std::size_t lane = 0; lane < count; ++lane) {
    const Permutation& grid = grids[lane];
    const std::uint64_t image = cells[lane].row * grid.columns + cells[lane].column;
    samples[lane] = static_cast<std::int64_t>(image < grid.size ? image : permute(grid, image));
  }
}

// Cache of block permutations, for one epoch of each dataset.
class EpochBlocks {
 public:
  explicit EpochBlocks(const EpochShuffles& shuffles) : shuffles_(shuffles), places_(shuffles.keys.size(), 0) {}

  std::uint64_t operator()(std::size_t dataset, std::uint64_t draw) {
    const std::uint64_t size = shuffles_.permutations[dataset].size;
    const auto [epoch, position] = epoch_draw(draw, size);
    std::uint32_t& place = places_[dataset];
    if (place == 0) {
      made_.push_back(make(dataset, epoch, size));
      place = static_cast<std::uint32_t>(made_.size());
    } else if (made_[place - 1].epoch != epoch) {
      made_[place - 1] = make(dataset, epoch, size);
    }
    return permute(made_[place - 1].permutation, position);
  }

 private:
  struct Made {
    std::uint64_t epoch;
    BlockPermutation permutation;
  };

  Made make(std::size_t dataset, std::uint64_t epoch, std::uint64_t size) const {
    const std::uint64_t key = split_mix(shuffles_.keys[dataset], epoch);
    return {epoch, make_block_permutation(size, key, shuffles_.block, shuffles_.window)};
  }

  const EpochShuffles& shuffles_;
  std::vector<std::uint32_t> places_;  // 1 + index of a dataset's permutation in made_, or 0
  std::vector<Made> made_;
};

}  // namespace

void epoch_samples(const EpochShuffles& shuffles, std::span<const std::int32_t> datasets,
                   std::span<const std::int64_t> draws, std::span<std::int64_t> samples) {
  if (shuffles.block == 1) {
    for (std::size_t i = 0; i < datasets.size(); i += kLanes) {
      const std::size_t count = std::min(kLanes, datasets.size() - i);
      permute_lanes(shuffles, datasets.data() + i, draws.data() + i, count, samples.data() + i);
    }
    return;
  }
  EpochBlocks blocks(shuffles);
  for (std::size_t i = 0; i < datasets.size(); ++i) {
    const auto draw = static_cast<std::uint64_t>(draws[i]);
    samples[i] = static_cast<std::int64_t>(blocks(static_cast<std::size_t>(datasets[i]), draw));
  }
}

}  // namespace trackbed
