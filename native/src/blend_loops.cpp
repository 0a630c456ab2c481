// Compiled once per instruction level, into the namespace TRACKBED_LEVEL. Must not use inline library code: the linker
// could pick a copy that was compiled here at a high level for all callers.

#include "trackbed/blend_loops.hpp"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace trackbed::TRACKBED_LEVEL {

namespace {

// Clang ignores the alignment of a type that is made a vector in the same attribute, so it is a type of its own.
using AlignedLanes = double __attribute__((vector_size(TRACKBED_LANE_BYTES)));
using Lanes [[gnu::aligned(8), gnu::may_alias]] = AlignedLanes;
using LaneIndices = std::int64_t __attribute__((vector_size(TRACKBED_LANE_BYTES)));
constexpr std::size_t kLanes = TRACKBED_LANE_BYTES / sizeof(double);

constexpr double kNever = __builtin_inf();

}  // namespace

// Each lane keeps the first largest error of its datasets. The lanes are compared at the end; on ties the lowest
// dataset wins.
std::size_t largest_error(const double* weights, const double* counts, std::size_t size, double step) {
  std::size_t best = 0;
  double best_error = weights[0] * step - counts[0];
  std::size_t next = 1;
  if (size >= kLanes) {
    Lanes lane_error = *reinterpret_cast<const Lanes*>(weights) * step - *reinterpret_cast<const Lanes*>(counts);
    LaneIndices lane_best;
    LaneIndices here;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      lane_best[lane] = here[lane] = static_cast<std::int64_t>(lane);
    }
    for (next = kLanes; next + kLanes <= size; next += kLanes) {
      here += static_cast<std::int64_t>(kLanes);
      const Lanes error =
          *reinterpret_cast<const Lanes*>(weights + next) * step - *reinterpret_cast<const Lanes*>(counts + next);
      const LaneIndices larger = error > lane_error;
      lane_error = larger ? error : lane_error;
      lane_best = larger ? here : lane_best;
    }
    best = static_cast<std::size_t>(lane_best[0]);
    best_error = lane_error[0];
    for (std::size_t lane = 1; lane < kLanes; ++lane) {
      const auto dataset = static_cast<std::size_t>(lane_best[lane]);
      if (lane_error[lane] > best_error || (lane_error[lane] == best_error && dataset < best)) {
        best_error = lane_error[lane];
        best = dataset;
      }
    }
  }
  for (; next < size; ++next) {
    const double error = weights[next] * step - counts[next];
    if (error > best_error) {
      best_error = error;
      best = next;
    }
  }
  return best;
}

std::size_t sieve(const double* weights, const double* counts, std::size_t size, double step, double threshold,
                  double* sieved_weights, double* sieved_counts, std::int32_t* at) {
  // Collects indices first, without a branch; then copies the entries, of which there are few.
  std::size_t found = 0;
#if defined(__AVX512F__)
  const __m512d steps = _mm512_set1_pd(step);
  const __m512d thresholds = _mm512_set1_pd(threshold);
  __m512i numbers = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (std::size_t entry = 0; entry < size; entry += 16) {
    __mmask8 passed[2];
    for (std::size_t half = 0; half < 2; ++half) {
      const __m512d shares = _mm512_mul_pd(_mm512_loadu_pd(weights + entry + 8 * half), steps);
      const __m512d errors = _mm512_sub_pd(shares, _mm512_loadu_pd(counts + entry + 8 * half));
      passed[half] = _mm512_cmp_pd_mask(errors, thresholds, _CMP_GE_OQ);
    }
    const __mmask16 both = _mm512_kunpackb(passed[1], passed[0]);
    _mm512_storeu_si512(at + found, _mm512_maskz_compress_epi32(both, numbers));
    found += static_cast<unsigned>(__builtin_popcount(both));
    numbers = _mm512_add_epi32(numbers, _mm512_set1_epi32(16));
  }
#else
  for (std::size_t entry = 0; entry < size; ++entry) {
    at[found] = static_cast<std::int32_t>(entry);
    found += weights[entry] * step - counts[entry] >= threshold ? 1 : 0;
  }
#endif
  for (std::size_t entry = 0; entry < found; ++entry) {
    sieved_weights[entry] = weights[at[entry]];
    sieved_counts[entry] = counts[at[entry]];
  }
  for (std::size_t entry = found; entry < found + BlendLoops::kPadding; ++entry) {
    sieved_weights[entry] = 0.0;
    sieved_counts[entry] = kNever;
  }
  return found;
}

#if defined(__AVX512F__)

namespace {

template <int kRegisters>
__m512d largest_of(const __m512d* errors) {
  if constexpr (kRegisters == 1) {
    return errors[0];
  } else {
    constexpr int kLeft = kRegisters / 2;
    return _mm512_max_pd(largest_of<kLeft>(errors), largest_of<kRegisters - kLeft>(errors + kLeft));
  }
}

// `draw` for entries that fit into registers. The latency from one draw to the next is the bottleneck, so the count of
// the largest error is incremented as soon as the comparison has found it, and all else overlaps.
template <int kRegisters>
std::size_t draw_in_registers(const double* weights, double* counts, double step, std::size_t num_steps,
                              double threshold, std::uint32_t* drawn, double* lowest) {
  __m512d weight[kRegisters];
  __m512d count[kRegisters];
  for (int k = 0; k < kRegisters; ++k) {
    weight[k] = _mm512_loadu_pd(weights + 8 * k);
    count[k] = _mm512_loadu_pd(counts + 8 * k);
  }
  const __m512d one = _mm512_set1_pd(1.0);
  const __m128d needed = _mm_set_sd(threshold);
  __m512d steps = _mm512_set1_pd(step);
  __m128d smallest = _mm_set_sd(*lowest);
  std::size_t number = 0;
  for (; number < num_steps; ++number) {
    __m512d errors[kRegisters];
    for (int k = 0; k < kRegisters; ++k) {
      errors[k] = _mm512_sub_pd(_mm512_mul_pd(weight[k], steps), count[k]);
    }
    const __m512d lanes = largest_of<kRegisters>(errors);
    const __m256d four = _mm256_max_pd(_mm512_castpd512_pd256(lanes), _mm512_extractf64x4_pd(lanes, 1));
    const __m128d two = _mm_max_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    const __m128d largest = _mm_max_pd(two, _mm_permute_pd(two, 1));
    if (__builtin_expect(_mm_comilt_sd(largest, needed), 0)) {
      break;
    }
    smallest = _mm_min_sd(smallest, largest);
    const __m512d all = _mm512_broadcastsd_pd(largest);
    std::uint64_t equal = 0;
    for (int k = 0; k < kRegisters; ++k) {
      const __mmask8 here = _mm512_cmp_pd_mask(errors[k], all, _CMP_EQ_OQ);
      count[k] = _mm512_mask_add_pd(count[k], here, count[k], one);
      equal |= std::uint64_t{here} << 8 * k;
    }
    const std::uint64_t others = equal & (equal - 1);
    if (__builtin_expect(others != 0, 0)) {  // the first one wins a tie: revert the counts of the others
      for (int k = 0; k < kRegisters; ++k) {
        count[k] = _mm512_mask_sub_pd(count[k], static_cast<__mmask8>(others >> 8 * k), count[k], one);
      }
    }
    drawn[number] = static_cast<std::uint32_t>(__builtin_ctzll(equal));
    steps = _mm512_add_pd(steps, one);
  }
  for (int k = 0; k < kRegisters; ++k) {
    _mm512_storeu_pd(counts + 8 * k, count[k]);
  }
  *lowest = _mm_cvtsd_f64(smallest);
  return number;
}

}  // namespace

#endif

std::size_t draw(const double* weights, double* counts, std::size_t size, double step, std::size_t num_steps,
                 double threshold, std::uint32_t* drawn, double* lowest) {
#if defined(__AVX512F__)
  switch ((size + 7) / 8) {
    case 1:
      return draw_in_registers<1>(weights, counts, step, num_steps, threshold, drawn, lowest);
    case 2:
      return draw_in_registers<2>(weights, counts, step, num_steps, threshold, drawn, lowest);
    case 3:
      return draw_in_registers<3>(weights, counts, step, num_steps, threshold, drawn, lowest);
    case 4:
      return draw_in_registers<4>(weights, counts, step, num_steps, threshold, drawn, lowest);
    case 5:
      return draw_in_registers<5>(weights, counts, step, num_steps, threshold, drawn, lowest);
    case 6:
      return draw_in_registers<6>(weights, counts, step, num_steps, threshold, drawn, lowest);
    case 7:
      return draw_in_registers<7>(weights, counts, step, num_steps, threshold, drawn, lowest);
    case 8:
      return draw_in_registers<8>(weights, counts, step, num_steps, threshold, drawn, lowest);
    default:
      break;
  }
#endif
  std::size_t number = 0;
  for (; number < num_steps; ++number, step += 1.0) {
    const std::size_t entry = largest_error(weights, counts, size, step);
    const double error = weights[entry] * step - counts[entry];
    if (error < threshold) {
      break;
    }
    *lowest = error < *lowest ? error : *lowest;
    counts[entry] += 1.0;
    drawn[number] = static_cast<std::uint32_t>(entry);
  }
  return number;
}

}  // namespace trackbed::TRACKBED_LEVEL
