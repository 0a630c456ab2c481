// Compiled once per instruction level, into the namespace TRACKBED_LEVEL. Must not use inline library code: the linker
// could pick a copy that was compiled here at a high level for all callers.

#include "trackbed/sum_ranks.hpp"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace trackbed::TRACKBED_LEVEL {

namespace {

// The vectors of each type have as many lanes as a register holds numbers in which the type is added. `store` rounds
// to nearest, ties to even; `round` gives what `load` reads after `store`, up to the bits of NaN.
struct Float32 {
  using Number = float;
  using Wide = float __attribute__((vector_size(TRACKBED_LANE_BYTES)));
  using Stored = Wide;
  static Wide load(Stored stored) { return stored; }
  static Stored store(Wide wide) { return wide; }
  static Wide round(Wide wide) { return wide; }
};

struct Float64 {
  using Number = double;
  using Wide = double __attribute__((vector_size(TRACKBED_LANE_BYTES)));
  using Stored = Wide;
  static Wide load(Stored stored) { return stored; }
  static Stored store(Wide wide) { return wide; }
  static Wide round(Wide wide) { return wide; }
};

using Bits = std::uint32_t __attribute__((vector_size(TRACKBED_LANE_BYTES)));
using Signed = std::int32_t __attribute__((vector_size(TRACKBED_LANE_BYTES)));
using Half = std::uint16_t __attribute__((vector_size(TRACKBED_LANE_BYTES / 2)));

Bits widen(Half half) {
#if defined(__AVX512F__)
  return reinterpret_cast<Bits>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(half)));
#else
  return __builtin_convertvector(half, Bits);
#endif
}

Half narrow(Bits bits) {
#if defined(__AVX512F__)
  return reinterpret_cast<Half>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(bits)));
#else
  return __builtin_convertvector(bits, Half);
#endif
}

struct Bfloat16 {
  using Number = std::uint16_t;
  using Wide = Float32::Wide;
  using Stored = Half;
  static Wide load(Stored stored) { return reinterpret_cast<Wide>(widen(stored) << 16); }
  static Stored store(Wide wide) { return narrow(rounded(wide) >> 16); }
  static Wide round(Wide wide) { return reinterpret_cast<Wide>(rounded(wide) & 0xffff0000U); }

 private:
  static Bits rounded(Wide wide) {
    const Bits bits = reinterpret_cast<Bits>(wide);
    const Bits nan = Bits{} + 0x7fc00000U;
    return wide != wide ? nan : bits + 0x7fffU + ((bits >> 16) & 1U);
  }
};

struct Float16 {
  using Number = std::uint16_t;
  using Wide = Float32::Wide;
  using Stored = Half;
#if defined(__AVX512F__)
  static Wide load(Stored stored) { return _mm512_cvtph_ps(reinterpret_cast<__m256i>(stored)); }
  static Stored store(Wide wide) {
    const Wide nan = reinterpret_cast<Wide>((reinterpret_cast<Bits>(wide) & 0x80000000U) | 0x7fc00000U);
    return reinterpret_cast<Stored>(_mm512_cvtps_ph(wide != wide ? nan : wide, _MM_FROUND_TO_NEAREST_INT));
  }
  static Wide round(Wide wide) { return load(store(wide)); }
#else
  static Wide load(Stored stored) {
    const Bits bits = widen(stored);
    const Signed rest = reinterpret_cast<Signed>(bits & 0x7fffU);
    const Signed normal = (rest << 13) + (112 << 23);
    const Signed subnormal = reinterpret_cast<Signed>(__builtin_convertvector(rest, Wide) * 0x1p-24F);
    const Signed special = (rest << 13) | 0x7f800000;
    const Signed finite = rest < 0x400 ? subnormal : normal;
    return reinterpret_cast<Wide>((rest < 0x7c00 ? finite : special) |
                                  reinterpret_cast<Signed>((bits & 0x8000U) << 16));
  }
  static Stored store(Wide wide) {
    const Bits bits = reinterpret_cast<Bits>(wide);
    const Signed rest = reinterpret_cast<Signed>(bits & 0x7fffffffU);
    const Signed normal = (rest - (112 << 23) + 0xfff + ((rest >> 13) & 1)) >> 13;
    constexpr std::int32_t kHalf = 126 << 23;  // adding 0.5 leaves the bits of a subnormal at the end of the sum
    const Signed subnormal = reinterpret_cast<Signed>(reinterpret_cast<Wide>(rest) + 0.5F) - kHalf;
    const Signed infinity = Signed{} + 0x7c00;
    const Signed finite = rest < (113 << 23) ? subnormal : rest < (143 << 23) ? normal : infinity;
    const Signed magnitude = wide != wide ? Signed{} + 0x7e00 : finite;
    return narrow(reinterpret_cast<Bits>(magnitude) | ((bits >> 16) & 0x8000U));
  }
  // Adding a power of two, at least 2^13 times as large as the number, leaves the bits that float16 has.
  static Wide round(Wide wide) {
    const Bits bits = reinterpret_cast<Bits>(wide);
    const Signed rest = reinterpret_cast<Signed>(bits & 0x7fffffffU);
    const Bits exponent = bits & 0x7f800000U;
    const Bits smallest = Bits{} + (113U << 23);  // exponent of the smallest normal number
    const Wide large = reinterpret_cast<Wide>((exponent > smallest ? exponent : smallest) + (13U << 23));
    const Wide finite = reinterpret_cast<Wide>(rest) + large - large;
    const Wide infinity = reinterpret_cast<Wide>(Signed{} + 0x7f800000);
    const Wide special = reinterpret_cast<Wide>(rest) + infinity;  // NaN stays NaN
    const Wide magnitude = rest < 0x477ff000 ? finite : special;   // from 65520 on, numbers are rounded to infinity
    return reinterpret_cast<Wide>(reinterpret_cast<Bits>(magnitude) | (bits & 0x80000000U));
  }
#endif
};

template <class Type>
constexpr std::size_t kLanes = sizeof(typename Type::Wide) / sizeof(typename Type::Wide{}[0]);

// Reads a vector of `lanes` numbers, and zeros behind them.
template <class Vector, class Number>
Vector read(const Number* numbers, std::size_t lanes) {
  using Anywhere [[gnu::aligned(1), gnu::may_alias]] = Vector;
  if (lanes == sizeof(Vector) / sizeof(Number)) {
    return *reinterpret_cast<const Anywhere*>(numbers);
  }
  Vector vector{};
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    vector[lane] = numbers[lane];
  }
  return vector;
}

// The same, and fetches what is read soon: between vectors with many instructions the processor alone looks too few
// ahead.
template <class Vector, class Number>
Vector read_ahead(const Number* numbers, std::size_t lanes) {
  constexpr std::uintptr_t kAheadBytes = 1024;
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(numbers) + kAheadBytes), 1);
  return read<Vector>(numbers, lanes);
}

template <class Vector, class Number>
void write(Vector vector, Number* numbers, std::size_t lanes) {
  using Anywhere [[gnu::aligned(1), gnu::may_alias]] = Vector;
  if (lanes == sizeof(Vector) / sizeof(Number)) {
    *reinterpret_cast<Anywhere*>(numbers) = vector;
    return;
  }
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    numbers[lane] = vector[lane];
  }
}

// Calls step(i, lanes) for each vector of `count` numbers, of which the last may have fewer lanes.
template <class Type, class Step>
[[gnu::always_inline]] inline void for_vectors(std::size_t count, const Step& step) {
  std::size_t i = 0;
  for (; i + kLanes<Type> <= count; i += kLanes<Type>) {
    step(i, kLanes<Type>);
  }
  if (i < count) {
    step(i, count - i);
  }
}

// The compiler knows which products and quotients are computed, so that loops have no branches.
template <class ScaledType, bool kScales, bool kDivides>
struct Scale {
  using Type = ScaledType;
  using Wide = typename Type::Wide;
  using Scalar = decltype(Wide{}[0] + 0);
  static constexpr bool scales = kScales;
  Wide factor;
  Wide divisor;

  explicit Scale(const RankSum& sum)
      : factor(Wide{} + static_cast<Scalar>(sum.factor)), divisor(Wide{} + static_cast<Scalar>(sum.divisor)) {}
  Wide product(typename Type::Stored stored) const {
    const Wide wide = Type::load(stored);
    return kScales ? Type::round(wide * factor) : wide;
  }
  typename Type::Stored total(Wide wide) const { return Type::store(kDivides ? wide / divisor : wide); }
};

// Without a factor, the rank that keeps its product keeps its buffer.
enum class Keeps { none, first, second };

template <class Scale, Keeps keeps>
void sum_two(const RankSum& sum, std::size_t start, std::size_t count) {
  using Type = typename Scale::Type;
  using Stored = typename Type::Stored;
  auto* const first = reinterpret_cast<typename Type::Number*>(sum.buffers[0]) + start;
  auto* const second = reinterpret_cast<typename Type::Number*>(sum.buffers[1]) + start;
  const Scale scale(sum);
  for_vectors<Type>(count, [=](std::size_t i, std::size_t lanes) {
    const auto one = scale.product(read_ahead<Stored>(first + i, lanes));
    const auto other = scale.product(read_ahead<Stored>(second + i, lanes));
    const Stored total = scale.total(one + other);
    if constexpr (keeps != Keeps::first) {
      write(total, first + i, lanes);
    } else if constexpr (Scale::scales) {
      write(Type::store(one), first + i, lanes);
    }
    if constexpr (keeps != Keeps::second) {
      write(total, second + i, lanes);
    } else if constexpr (Scale::scales) {
      write(Type::store(other), second + i, lanes);
    }
  });
}

// Adds the products of one rank to a row, or begins the row with them.
template <class Scale, bool begins, bool keeps>
void add_row(const Scale scale, typename Scale::Type::Number* numbers, typename Scale::Scalar* row, std::size_t count) {
  using Type = typename Scale::Type;
  using Wide = typename Scale::Wide;
  for_vectors<Type>(count, [=](std::size_t i, std::size_t lanes) {
    const Wide product = scale.product(read_ahead<typename Type::Stored>(numbers + i, lanes));
    write(begins ? product : read<Wide>(row + i, kLanes<Type>) + product, row + i, kLanes<Type>);
    if constexpr (keeps && Scale::scales) {
      write(Type::store(product), numbers + i, lanes);
    }
  });
}

// Sums at most as many numbers as a row holds.
template <class Scale>
void sum_many(const RankSum& sum, std::size_t start, std::size_t count, std::byte* rows) {
  using Type = typename Scale::Type;
  using Wide = typename Scale::Wide;
  const Scale scale(sum);
  const std::size_t num_ranks = sum.num_ranks;
  const auto numbers = [&](std::size_t rank) {
    return reinterpret_cast<typename Type::Number*>(sum.buffers[rank]) + start;
  };
  const auto keeps = [&](std::size_t rank) { return sum.owner < num_ranks && rank != sum.owner; };
  const auto row = [&](std::size_t number) {
    return reinterpret_cast<typename Scale::Scalar*>(rows + number * kSumRowBytes);
  };
  const std::size_t half = (num_ranks + 1) / 2;
  for (std::size_t rank = 0; rank < half; ++rank) {
    (keeps(rank) ? add_row<Scale, true, true> : add_row<Scale, true, false>)(scale, numbers(rank), row(rank), count);
  }
  for (std::size_t rank = half; rank < num_ranks; ++rank) {
    (keeps(rank) ? add_row<Scale, false, true> : add_row<Scale, false, false>)(scale, numbers(rank), row(rank - half),
                                                                               count);
  }
  for (std::size_t left = half; left > 1; left = (left + 1) / 2) {
    const std::size_t middle = (left + 1) / 2;
    for (std::size_t rank = middle; rank < left; ++rank) {
      auto* const target = row(rank - middle);
      const auto* const source = row(rank);
      for_vectors<Type>(count, [=](std::size_t i, std::size_t) {
        write(read<Wide>(target + i, kLanes<Type>) + read<Wide>(source + i, kLanes<Type>), target + i, kLanes<Type>);
      });
    }
  }
  const auto* const total = row(0);
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    if (!keeps(rank)) {
      auto* const target = numbers(rank);
      for_vectors<Type>(count, [=](std::size_t i, std::size_t lanes) {
        write(scale.total(read<Wide>(total + i, kLanes<Type>)), target + i, lanes);
      });
    }
  }
}

template <class Scale>
void sum_scaled(const RankSum& sum, std::size_t start, std::size_t stop, std::byte* rows) {
  if (sum.num_ranks == 2) {
    return (sum.owner == 0   ? sum_two<Scale, Keeps::second>
            : sum.owner == 1 ? sum_two<Scale, Keeps::first>
                             : sum_two<Scale, Keeps::none>)(sum, start, stop - start);
  }
  constexpr std::size_t kBlock = kSumRowBytes / sizeof(typename Scale::Scalar);
  for (; start < stop; start += kBlock) {
    sum_many<Scale>(sum, start, stop - start < kBlock ? stop - start : kBlock, rows);
  }
}

template <class Type>
void sum_type(const RankSum& sum, std::size_t start, std::size_t stop, std::byte* rows) {
  const bool scales = sum.factor != 1;
  const bool divides = sum.divisor != 1;
  return (scales    ? divides ? sum_scaled<Scale<Type, true, true>> : sum_scaled<Scale<Type, true, false>>
          : divides ? sum_scaled<Scale<Type, false, true>>
                    : sum_scaled<Scale<Type, false, false>>)(sum, start, stop, rows);
}

}  // namespace

void sum_loop(const RankSum& sum, std::size_t start, std::size_t stop, std::byte* rows) {
  switch (sum.number) {
    case Number::float32:
      return sum_type<Float32>(sum, start, stop, rows);
    case Number::float64:
      return sum_type<Float64>(sum, start, stop, rows);
    case Number::bfloat16:
      return sum_type<Bfloat16>(sum, start, stop, rows);
    case Number::float16:
      return sum_type<Float16>(sum, start, stop, rows);
  }
}

}  // namespace trackbed::TRACKBED_LEVEL
