// Vectors of numbers of every type, for files that are compiled once per instruction level.
#pragma once

#include <cstddef>
#include <cstdint>

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

// Fetches what is read later: between vectors with many instructions the processor alone looks too few ahead.
void prefetch(const void* address, std::uintptr_t ahead_bytes) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(address) + ahead_bytes), 1);
}

template <class Vector, class Number>
Vector read_ahead(const Number* numbers, std::size_t lanes) {
  prefetch(numbers, 1024);
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

}  // namespace

}  // namespace trackbed::TRACKBED_LEVEL
