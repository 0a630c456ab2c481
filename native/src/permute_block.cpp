// Compiled once per instruction level, into the namespace TRACKBED_LEVEL. Must not use inline library code: the linker
// could pick a copy that was compiled here at a high level for all callers.

#include "trackbed/permute_block.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace trackbed::TRACKBED_LEVEL {

namespace {

// Lanes are a register of 64-bit numbers; kGroup registers are interleaved to hide the latency of multiplications.
// Coordinates and their bounds are below 2**32, sums of two below 2**33; `narrow` numbers are below 2**32.
#if defined(__AVX2__)

using Lanes = std::uint64_t __attribute__((vector_size(TRACKBED_LANE_BYTES)));
// Clang ignores the alignment of a type that is made a vector in the same attribute.
using LoadedLanes [[gnu::aligned(8), gnu::may_alias]] = Lanes;
constexpr std::size_t kGroup = 4;

Lanes high_half(Lanes a) { return a >> 32; }
Lanes low_half(Lanes a) { return a & 0xffffffff; }

#if defined(__AVX512F__)

Lanes multiply_low_halves(Lanes a, Lanes b) { return (Lanes)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)b); }
Lanes multiply_narrow(Lanes narrow, Lanes b) { return narrow * b; }
Lanes multiply(Lanes a, Lanes b) { return a * b; }
// A negative difference is the larger one as an unsigned number.
Lanes wrapped(Lanes sum, Lanes bound) {
  return (Lanes)_mm512_maskz_min_epu64(0xff, (__m512i)sum, (__m512i)(sum - bound));
}
bool any_reaches(Lanes number, Lanes bound) { return _mm512_cmpge_epu64_mask((__m512i)number, (__m512i)bound) != 0; }

#else

Lanes multiply_low_halves(Lanes a, Lanes b) { return (Lanes)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
Lanes multiply_narrow(Lanes narrow, Lanes b) {
  return multiply_low_halves(narrow, b) + (multiply_low_halves(narrow, high_half(b)) << 32);
}
Lanes multiply(Lanes a, Lanes b) {
  const Lanes crossed = multiply_low_halves(a, high_half(b)) + multiply_low_halves(high_half(a), b);
  return multiply_low_halves(a, b) + (crossed << 32);
}
Lanes wrapped(Lanes sum, Lanes bound) {
  const Lanes less = sum - bound;
  return (Lanes)_mm256_blendv_pd((__m256d)less, (__m256d)sum, (__m256d)less);
}
// A number and a bound differ by less than 2**63, so the sign of the difference is valid.
bool any_reaches(Lanes number, Lanes bound) { return _mm256_movemask_pd((__m256d)(number - bound)) != 0xf; }

#endif

// Upper 64 bits of a * narrow.
Lanes multiply_high_narrow(Lanes a, Lanes narrow) {
  return high_half(multiply_low_halves(high_half(a), narrow) + high_half(multiply_low_halves(a, narrow)));
}

// Upper 64 bits of a * b.
Lanes multiply_high(Lanes a, Lanes b) {
  const Lanes crossed = multiply_low_halves(high_half(a), b) + high_half(multiply_low_halves(a, b));
  const Lanes other = multiply_low_halves(a, high_half(b)) + low_half(crossed);
  return multiply_low_halves(high_half(a), high_half(b)) + high_half(crossed) + high_half(other);
}

#else

// One number at a time, because vectors without wide multiplications are slower.
using Lanes = std::uint64_t;
using LoadedLanes = std::uint64_t __attribute__((may_alias));
constexpr std::size_t kGroup = 4;

Lanes multiply_low_halves(Lanes narrow, Lanes other) { return narrow * other; }
Lanes multiply_narrow(Lanes narrow, Lanes b) { return narrow * b; }
Lanes multiply(Lanes a, Lanes b) { return a * b; }
Lanes multiply_high(Lanes a, Lanes b) { return permutation::multiply_high(a, b); }
Lanes multiply_high_narrow(Lanes a, Lanes narrow) { return permutation::multiply_high(a, narrow); }
Lanes wrapped(Lanes sum, Lanes bound) {
  const Lanes less = sum - bound;
  return less < sum ? less : sum;
}
bool any_reaches(Lanes number, Lanes bound) { return number >= bound; }

#endif

constexpr std::size_t kLanes = sizeof(Lanes) / sizeof(std::uint64_t);

Lanes all(std::uint64_t value) { return Lanes{} + value; }

// permutation::hash in lanes.
Lanes hash(Lanes coordinate, Lanes key, Lanes bound) {
  Lanes bits = multiply_narrow(coordinate, all(permutation::kMultiplier)) + key;
  bits ^= bits >> 32;
  return multiply_high_narrow(multiply(bits, all(permutation::kFinalMultiplier)), bound);
}

// permutation::pass in lanes.
void pass(const Permutation& grid, const std::int64_t* positions, Lanes* images) {
  const Lanes num_rows = all(grid.rows);
  const Lanes num_columns = all(grid.columns);
  Lanes rows[kGroup];
  Lanes columns[kGroup];
  for (std::size_t i = 0; i < kGroup; ++i) {
    const Lanes position = *reinterpret_cast<const LoadedLanes*>(positions + i * kLanes);
    const Lanes row = multiply_high(position, all(grid.reciprocal));
    const Lanes column = position - multiply_low_halves(row, num_columns);
    rows[i] = row + ((column - num_columns) >> 63 ^ 1);  // adds 1 unless the difference is negative
    columns[i] = wrapped(column, num_columns);
  }
  std::uint64_t key = grid.key;
  for (std::uint64_t round = 0; round < grid.rounds; round += 2) {
    for (std::size_t i = 0; i < kGroup; ++i) {
      rows[i] = wrapped(rows[i] + hash(columns[i], all(key), num_rows), num_rows);
    }
    for (std::size_t i = 0; i < kGroup; ++i) {
      columns[i] = wrapped(columns[i] + hash(rows[i], all(key + permutation::kNextKey), num_columns), num_columns);
    }
    key += 2 * permutation::kNextKey;
  }
  for (std::size_t i = 0; i < kGroup; ++i) {
    images[i] = multiply_low_halves(rows[i], num_columns) + columns[i];
  }
}

}  // namespace

void permute_block(const Permutation& permutation, const std::int64_t* positions, std::int64_t* images,
                   std::size_t count) {
  constexpr std::size_t kStep = kGroup * kLanes;
  // A local copy, which the compiler knows that no store can alias.
  const Permutation grid = permutation;
  std::size_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    Lanes passed[kGroup];
    pass(grid, positions + i, passed);
    for (std::size_t part = 0; part < kGroup; ++part) {
      std::int64_t* to = images + i + part * kLanes;
      *reinterpret_cast<LoadedLanes*>(to) = passed[part];
      if (any_reaches(passed[part], all(grid.size))) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
          if (static_cast<std::uint64_t>(to[lane]) >= grid.size) {
            to[lane] = static_cast<std::int64_t>(permute(grid, static_cast<std::uint64_t>(to[lane])));
          }
        }
      }
    }
  }
  for (; i < count; ++i) {
    images[i] = static_cast<std::int64_t>(permute(grid, static_cast<std::uint64_t>(positions[i])));
  }
}

}  // namespace trackbed::TRACKBED_LEVEL
