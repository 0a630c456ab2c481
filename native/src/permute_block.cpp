// Compiled once per instruction level, into the namespace that TRACKBED_LEVEL names. It uses no inline
// library code: that could be emitted here at a high level and then be picked by the linker for all.

#include "trackbed/permute_block.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace trackbed::TRACKBED_LEVEL {

namespace {

// Lanes are a register of 64-bit numbers. Coordinates are below 2**32, as rows and columns are, and sums of two below
// 2**33; `narrow` numbers are below 2**32.
#if defined(__AVX512F__)

using Lanes = __m512i;
constexpr std::size_t kLanes = 8;
constexpr std::size_t kGroup = 2;

Lanes load(const std::int64_t* from) { return _mm512_loadu_si512(from); }
void store(std::int64_t* to, Lanes lanes) { _mm512_storeu_si512(to, lanes); }
Lanes all(std::uint64_t value) { return _mm512_set1_epi64(static_cast<long long>(value)); }
Lanes add(Lanes a, Lanes b) { return _mm512_add_epi64(a, b); }
Lanes subtract(Lanes a, Lanes b) { return _mm512_sub_epi64(a, b); }
Lanes exclusive_or(Lanes a, Lanes b) { return _mm512_xor_si512(a, b); }
Lanes low_half(Lanes a) { return _mm512_and_si512(a, all(0xffffffff)); }
Lanes high_half(Lanes a) { return _mm512_srli_epi64(a, 32); }
Lanes multiply_low_halves(Lanes a, Lanes b) { return _mm512_mul_epu32(a, b); }
Lanes multiply_narrow(Lanes narrow, Lanes b) { return _mm512_mullo_epi64(narrow, b); }
Lanes multiply(Lanes a, Lanes b) { return _mm512_mullo_epi64(a, b); }
// A difference below 0 is the larger number of the two.
Lanes wrapped(Lanes sum, Lanes bound) { return _mm512_min_epu64(sum, subtract(sum, bound)); }
// 1 where a number reaches the bound.
Lanes reaches(Lanes number, Lanes bound) {
  return _mm512_maskz_mov_epi64(_mm512_cmpge_epu64_mask(number, bound), all(1));
}
bool any_reaches(Lanes number, Lanes bound) { return _mm512_cmpge_epu64_mask(number, bound) != 0; }

#elif defined(__AVX2__)

using Lanes = __m256i;
constexpr std::size_t kLanes = 4;
constexpr std::size_t kGroup = 2;

Lanes load(const std::int64_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
void store(std::int64_t* to, Lanes lanes) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), lanes); }
Lanes all(std::uint64_t value) { return _mm256_set1_epi64x(static_cast<long long>(value)); }
Lanes add(Lanes a, Lanes b) { return _mm256_add_epi64(a, b); }
Lanes subtract(Lanes a, Lanes b) { return _mm256_sub_epi64(a, b); }
Lanes exclusive_or(Lanes a, Lanes b) { return _mm256_xor_si256(a, b); }
Lanes low_half(Lanes a) { return _mm256_and_si256(a, all(0xffffffff)); }
Lanes high_half(Lanes a) { return _mm256_srli_epi64(a, 32); }
Lanes multiply_low_halves(Lanes a, Lanes b) { return _mm256_mul_epu32(a, b); }
Lanes multiply_narrow(Lanes narrow, Lanes b) {
  return add(multiply_low_halves(narrow, b), _mm256_slli_epi64(multiply_low_halves(narrow, high_half(b)), 32));
}
Lanes multiply(Lanes a, Lanes b) {
  return add(multiply_narrow(a, b), _mm256_slli_epi64(multiply_low_halves(high_half(a), b), 32));
}
Lanes wrapped(Lanes sum, Lanes bound) {
  const __m256d less = _mm256_castsi256_pd(subtract(sum, bound));
  return _mm256_castpd_si256(_mm256_blendv_pd(less, _mm256_castsi256_pd(sum), less));
}
// A number and a bound differ by less than 2**63, so that the difference's sign tells.
Lanes reaches(Lanes number, Lanes bound) {
  return _mm256_xor_si256(_mm256_srli_epi64(subtract(number, bound), 63), all(1));
}
bool any_reaches(Lanes number, Lanes bound) {
  return _mm256_movemask_pd(_mm256_castsi256_pd(subtract(number, bound))) != 0xf;
}

#else

// One number at a time: without wide multiplications, vectors would be slower. Several at once hide how long each
// multiplication takes.
using Lanes = std::uint64_t;
constexpr std::size_t kLanes = 1;
constexpr std::size_t kGroup = 4;

Lanes load(const std::int64_t* from) { return static_cast<std::uint64_t>(*from); }
void store(std::int64_t* to, Lanes lanes) { *to = static_cast<std::int64_t>(lanes); }
Lanes all(std::uint64_t value) { return value; }
Lanes add(Lanes a, Lanes b) { return a + b; }
Lanes subtract(Lanes a, Lanes b) { return a - b; }
Lanes exclusive_or(Lanes a, Lanes b) { return a ^ b; }
Lanes high_half(Lanes a) { return a >> 32; }
Lanes multiply_low_halves(Lanes narrow, Lanes other) { return narrow * other; }
Lanes multiply_narrow(Lanes narrow, Lanes b) { return narrow * b; }
Lanes multiply(Lanes a, Lanes b) { return a * b; }
Lanes multiply_high(Lanes a, Lanes b) { return permutation::multiply_high(a, b); }
Lanes multiply_high_narrow(Lanes a, Lanes narrow) { return permutation::multiply_high(a, narrow); }
Lanes wrapped(Lanes sum, Lanes bound) {
  const Lanes less = sum - bound;
  return less < sum ? less : sum;
}
Lanes reaches(Lanes number, Lanes bound) { return number >= bound; }
bool any_reaches(Lanes number, Lanes bound) { return number >= bound; }

#endif

#if defined(__AVX2__)

// The upper 64 bits of a * narrow.
Lanes multiply_high_narrow(Lanes a, Lanes narrow) {
  return high_half(add(multiply_low_halves(high_half(a), narrow), high_half(multiply_low_halves(a, narrow))));
}

// The upper 64 bits of a * b.
Lanes multiply_high(Lanes a, Lanes b) {
  const Lanes crossed = add(multiply_low_halves(high_half(a), b), high_half(multiply_low_halves(a, b)));
  const Lanes other = add(multiply_low_halves(a, high_half(b)), low_half(crossed));
  return add(multiply_low_halves(high_half(a), high_half(b)), add(high_half(crossed), high_half(other)));
}

#endif

// permutation::hash, cell_of and pass, in lanes.
Lanes hash(Lanes coordinate, Lanes key, Lanes bound) {
  Lanes bits = add(multiply_narrow(coordinate, all(permutation::kMultiplier)), key);
  bits = exclusive_or(bits, high_half(bits));
  return multiply_high_narrow(multiply(bits, all(permutation::kFinalMultiplier)), bound);
}

// One way through all rounds, for kGroup registers that take turns.
void pass(const Permutation& grid, const std::int64_t* positions, Lanes* images) {
  const Lanes num_rows = all(grid.rows);
  const Lanes num_columns = all(grid.columns);
  Lanes rows[kGroup];
  Lanes columns[kGroup];
  for (std::size_t i = 0; i < kGroup; ++i) {
    const Lanes position = load(positions + i * kLanes);
    const Lanes row = multiply_high(position, all(grid.reciprocal));
    const Lanes column = subtract(position, multiply_low_halves(row, num_columns));
    rows[i] = add(row, reaches(column, num_columns));
    columns[i] = wrapped(column, num_columns);
  }
  std::uint64_t key = grid.key;
  for (std::uint64_t round = 0; round < grid.rounds; round += 2) {
    for (std::size_t i = 0; i < kGroup; ++i) {
      rows[i] = wrapped(add(rows[i], hash(columns[i], all(key), num_rows)), num_rows);
    }
    for (std::size_t i = 0; i < kGroup; ++i) {
      columns[i] = wrapped(add(columns[i], hash(rows[i], all(key + permutation::kNextKey), num_columns)), num_columns);
    }
    key += 2 * permutation::kNextKey;
  }
  for (std::size_t i = 0; i < kGroup; ++i) {
    images[i] = add(multiply_low_halves(rows[i], num_columns), columns[i]);
  }
}

}  // namespace

void permute_block(const Permutation& permutation, const std::int64_t* positions, std::int64_t* images,
                   std::size_t count) {
  constexpr std::size_t kStep = kGroup * kLanes;
  // A copy, so that the compiler need not fear that a store changes it.
  const Permutation grid = permutation;
  const Lanes size = all(grid.size);
  std::size_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    Lanes passed[kGroup];
    pass(grid, positions + i, passed);
    for (std::size_t part = 0; part < kGroup; ++part) {
      std::int64_t* to = images + i + part * kLanes;
      store(to, passed[part]);
      if (any_reaches(passed[part], size)) {
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
