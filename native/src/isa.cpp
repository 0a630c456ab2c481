#include "trackbed/isa.hpp"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>
#endif

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

#if defined(__x86_64__)

namespace {

// Asks the processor for its instructions, and the system for the registers that it saves. `__builtin_cpu_supports`
// needs a library of the compiler that not every build links: without it, every level is missing.
Isa ask_processor() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & bit_OSXSAVE) == 0) {
    return Isa::baseline;
  }
  std::uint32_t saved = 0;
  std::uint32_t high = 0;
  __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  constexpr std::uint32_t kAvx = 0x06;     // registers of 16 and 32 bytes
  constexpr std::uint32_t kAvx512 = 0xe6;  // those, masks, and registers of 64 bytes
  if ((saved & kAvx) != kAvx || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) {
    return Isa::baseline;
  }
  constexpr std::uint32_t kWanted = bit_AVX512F | bit_AVX512DQ | bit_AVX512VL;
  if ((saved & kAvx512) == kAvx512 && (ebx & kWanted) == kWanted) {
    return Isa::avx512;
  }
  return (ebx & bit_AVX2) != 0 ? Isa::avx2 : Isa::baseline;
}

}  // namespace

#endif

Isa best_isa() {
#if defined(__x86_64__)
  static const Isa best = ask_processor();  // once: a virtual machine takes 11 us for each `cpuid`
  return best;
#else
  return Isa::baseline;
#endif
}

BlendLoops blend_loops_at([[maybe_unused]] Isa level) { return TRACKBED_AT(level, blend_loops); }

TargetDraws target_draws_at([[maybe_unused]] Isa level) { return TRACKBED_AT(level, target_draws); }

PermuteBlock permute_block_at([[maybe_unused]] Isa level) { return TRACKBED_AT(level, permute_block); }

GatherLoops gather_loops_at([[maybe_unused]] Isa level) { return TRACKBED_AT(level, gather_loops); }

SquareLoop square_loop_at([[maybe_unused]] Isa level) { return TRACKBED_AT(level, square_loop); }

SumLoop sum_loop_at([[maybe_unused]] Isa level) { return TRACKBED_AT(level, sum_loop); }

}  // namespace trackbed
