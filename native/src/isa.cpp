#include "trackbed/isa.hpp"

#include "trackbed/blend_loops.hpp"
#include "trackbed/draw_targets.hpp"
#include "trackbed/gather_loops.hpp"
#include "trackbed/permute_block.hpp"
#include "trackbed/square_sum.hpp"
#include "trackbed/sum_ranks.hpp"

namespace trackbed {

// Declarations of the functions in the object files of each level.
#define TRACKBED_DECLARE(level)                                                                                  \
  namespace level {                                                                                              \
  std::size_t largest_error(const double*, const double*, std::size_t, double);                                  \
  std::size_t sieve(const double*, const double*, std::size_t, double, double, double*, double*, std::int32_t*); \
  std::size_t draw(const double*, double*, std::size_t, double, std::size_t, double, std::uint32_t*, double*);   \
  constexpr BlendLoops blend_loops{largest_error, sieve, draw};                                                  \
  std::size_t draw_narrow(MersenneTwister&, std::uint64_t, std::uint32_t*);                                      \
  void draw_wide(MersenneTwister&, std::uint64_t, std::uint64_t*, std::size_t);                                  \
  void regenerate(MersenneTwister&);                                                                             \
  constexpr TargetDraws target_draws{draw_narrow, draw_wide, regenerate};                                        \
  void permute_block(const Permutation&, const std::int64_t*, std::int64_t*, std::size_t);                       \
  void widen(std::int64_t, const std::byte*, std::size_t, std::int64_t*);                                        \
  void mask(std::int64_t*, std::int64_t*, std::size_t, std::int64_t, std::int64_t, bool, float*);                \
  void keep_all(std::size_t, float*);                                                                            \
  void count_up(std::int64_t*, std::size_t);                                                                     \
  std::size_t find(const std::int64_t*, std::size_t, std::int64_t);                                              \
  constexpr GatherLoops gather_loops{widen, mask, keep_all, count_up, find};                                     \
  void sum_loop(const RankSum&, std::size_t, std::size_t, std::byte*);                                           \
  void square_loop(const std::byte*, Number, std::size_t, std::int64_t*);                                        \
  }

TRACKBED_DECLARE(baseline)
#if defined(__x86_64__)
TRACKBED_DECLARE(avx2)
TRACKBED_DECLARE(avx512)
#define TRACKBED_AT(level, name) \
  (level == Isa::avx512 ? avx512::name : level == Isa::avx2 ? avx2::name : baseline::name)
#else
#define TRACKBED_AT(level, name) (baseline::name)
#endif

Isa best_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return Isa::avx512;
  }
  if (__builtin_cpu_supports("avx2")) {
    return Isa::avx2;
  }
#endif
  return Isa::baseline;
}

BlendLoops blend_loops_at([[maybe_unused]] Isa level) { return TRACKBED_AT(level, blend_loops); }

TargetDraws target_draws_at([[maybe_unused]] Isa level) { return TRACKBED_AT(level, target_draws); }

PermuteBlock permute_block_at([[maybe_unused]] Isa level) { return TRACKBED_AT(level, permute_block); }

GatherLoops gather_loops_at([[maybe_unused]] Isa level) { return TRACKBED_AT(level, gather_loops); }

SquareLoop square_loop_at([[maybe_unused]] Isa level) { return TRACKBED_AT(level, square_loop); }

SumLoop sum_loop_at([[maybe_unused]] Isa level) { return TRACKBED_AT(level, sum_loop); }

}  // namespace trackbed
