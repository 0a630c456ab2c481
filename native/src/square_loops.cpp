// Compiled once per instruction level, into the namespace TRACKBED_LEVEL. Must not use inline library code: the linker
// could pick a copy that was compiled here at a high level for all callers.
//
// Squares are summed in blocks. Adding 1.5 * 2^(52 + unit) to a square rounds it to a multiple of 2^unit, which is then
// an integer in the lowest bits of the result; the integers of a block are added in 64 bits. The rest of the square is
// exact, and is summed in the next window, whose unit is 2^52 times smaller. Two windows contain the squares of most
// blocks; a block of numbers of very different magnitudes takes more.

#include "number_lanes.hpp"
#include "trackbed/square_sum.hpp"

namespace trackbed::TRACKBED_LEVEL {

namespace {

__extension__ typedef __int128 Shifted;

constexpr std::size_t kBlock = 2048;  // at most 2^12, for the integers to fit
constexpr int kWindow = 52;

template <class Float>
struct Format;

template <>
struct Format<float> {
  using Unsigned = std::uint32_t;
  using Signed = std::int32_t;
  static constexpr int mantissa = 23;
  static constexpr int bias = 127;
  static constexpr Signed limit = 0x7f800000;  // infinity
};

template <>
struct Format<double> {
  using Unsigned = std::uint64_t;
  using Signed = std::int64_t;
  static constexpr int mantissa = 52;
  static constexpr int bias = 1023;
  static constexpr Signed limit = Signed{1023 + 128} << 52;  // 2^128
};

// Bits, without the sign, of the smallest number of a block that is not zero, and of the largest.
template <class Float>
struct Range {
  typename Format<Float>::Unsigned smallest;
  typename Format<Float>::Signed largest;
};

template <class Float>
Range<Float> range_of(const Float* floats) {
  using Wide [[gnu::vector_size(TRACKBED_LANE_BYTES)]] = Float;
  using Unsigned [[gnu::vector_size(TRACKBED_LANE_BYTES)]] = typename Format<Float>::Unsigned;
  using Signed [[gnu::vector_size(TRACKBED_LANE_BYTES)]] = typename Format<Float>::Signed;
  constexpr std::size_t lanes = TRACKBED_LANE_BYTES / sizeof(Float);
  Unsigned smallest = ~Unsigned{};
  Signed largest{};
  for (std::size_t i = 0; i < kBlock; i += lanes) {
    const Unsigned bits = reinterpret_cast<Unsigned>(read<Wide>(floats + i, lanes)) << 1 >> 1;
    const Unsigned before = bits - 1;  // zero wraps around to the highest
    smallest = before < smallest ? before : smallest;
    largest = reinterpret_cast<Signed>(bits) > largest ? reinterpret_cast<Signed>(bits) : largest;
  }
  Range<Float> range{smallest[0], largest[0]};
  for (std::size_t lane = 1; lane < lanes; ++lane) {
    range.smallest = smallest[lane] < range.smallest ? smallest[lane] : range.smallest;
    range.largest = largest[lane] > range.largest ? largest[lane] : range.largest;
  }
  ++range.smallest;
  return range;
}

using Doubles = Float64::Wide;
using Integers = std::int64_t __attribute__((vector_size(TRACKBED_LANE_BYTES)));
constexpr std::size_t kDoubles = TRACKBED_LANE_BYTES / sizeof(double);

// A double whose lowest bit counts 2^unit, also after adding or subtracting a number up to 2^(51 + unit).
double counter(int unit) {
  return 1.5 * __builtin_bit_cast(double, static_cast<std::int64_t>(1023 + kWindow + unit) << 52);
}

void add_digits(std::int64_t* sum, std::int64_t number, int unit) {
  const int place = unit - kSquareUnit;
  const Shifted shifted = static_cast<Shifted>(number) * (std::int64_t{1} << (place % 32));
  std::int64_t* const digits = sum + place / 32;
  digits[0] += static_cast<std::int64_t>(shifted & 0xffffffff);
  digits[1] += static_cast<std::int64_t>((shifted >> 32) & 0xffffffff);
  digits[2] += static_cast<std::int64_t>(shifted >> 64);
}

// Sums the multiples of 2^first and 2^second that are nearest to the numbers of a block, and stores the rests.
template <bool keeps, class Next>
[[gnu::always_inline]] inline void sum_windows(const Next& next, double* rests, int first, int second,
                                               std::int64_t* sum) {
  const Doubles high = Doubles{} + counter(first);
  const Doubles low = Doubles{} + counter(second);
  Integers highs{};
  Integers lows{};
  for (std::size_t i = 0; i < kBlock; i += kDoubles) {
    const Doubles number = next(i);
    const Doubles coarse = number + high;
    const Doubles rest = number - (coarse - high);
    const Doubles fine = rest + low;
    highs += reinterpret_cast<Integers>(coarse) - reinterpret_cast<Integers>(high);
    lows += reinterpret_cast<Integers>(fine) - reinterpret_cast<Integers>(low);
    if constexpr (keeps) {
      write(rest - (fine - low), rests + i, kDoubles);
    }
  }
  std::int64_t high_sum = 0;
  std::int64_t low_sum = 0;
  for (std::size_t lane = 0; lane < kDoubles; ++lane) {
    high_sum += highs[lane];
    low_sum += lows[lane];
  }
  add_digits(sum, high_sum, first);
  add_digits(sum, low_sum, second);
}

Doubles widen_floats(const float* floats) {
  using Floats = float __attribute__((vector_size(TRACKBED_LANE_BYTES / 2)));
  return __builtin_convertvector(read<Floats>(floats, kDoubles), Doubles);
}

Doubles widen_floats(const double* floats) { return read<Doubles>(floats, kDoubles); }

int at_least(int number, int bound) { return number < bound ? bound : number; }

// Every square is below 2^top. Multiples of 2^bottom are summed.
template <class Float>
void sum_squares(const Float* floats, int top, int bottom, std::int64_t* sum) {
  double rests[kBlock];
  int first = at_least(top - kWindow + 1, kSquareUnit);
  int second = at_least(first - kWindow, kSquareUnit);
  const auto square = [=](std::size_t i) {
    prefetch(floats + i, kBlock * sizeof(Float));  // of the next block, which most often follows
    const Doubles wide = widen_floats(floats + i);
    return wide * wide;
  };
  if (second <= bottom) {
    return sum_windows<false>(square, rests, first, second, sum);
  }
  sum_windows<true>(square, rests, first, second, sum);
  while (second > bottom) {
    first = at_least(second - kWindow, kSquareUnit);
    second = at_least(first - kWindow, kSquareUnit);
    sum_windows<true>([&](std::size_t i) { return read<Doubles>(rests + i, kDoubles); }, rests, first, second, sum);
  }
}

template <class Float, class Bits>
int exponent_of(Bits bits) {
  return at_least(static_cast<int>(bits >> Format<Float>::mantissa), 1) - Format<Float>::bias;
}

// Sums finite numbers. At most `digits` bits follow the first bit of a number's square if it is 1, else fewer.
template <class Float>
void sum_finite(const Float* floats, const Range<Float>& range, int digits, std::int64_t* sum) {
  if (range.largest != 0) {
    const int top = 2 * (exponent_of<Float>(range.largest) + 1);
    const int bottom = 2 * exponent_of<Float>(range.smallest) - digits;
    sum_squares(floats, top, at_least(bottom, kSquareUnit), sum);
  }
}

// Sums numbers of which some are not finite: these are only counted.
template <class Float>
void sum_special(const Float* floats, int digits, std::int64_t* sum) {
  Float finite[kBlock];
  for (std::size_t i = 0; i < kBlock; ++i) {
    const auto bits = __builtin_bit_cast(typename Format<Float>::Unsigned, floats[i]) << 1 >> 1;
    const bool is_finite = static_cast<typename Format<Float>::Signed>(bits) < Format<Float>::limit;
    finite[i] = is_finite ? floats[i] : 0;
    sum[floats[i] != floats[i] ? kSquareDigits : kSquareDigits + 1] += is_finite ? 0 : 1;
  }
  sum_finite(finite, range_of(finite), digits, sum);
}

template <class Float>
void sum_block(const Float* floats, int digits, std::int64_t* sum) {
  const Range<Float> range = range_of(floats);
  if (range.largest < Format<Float>::limit) {
    sum_finite(floats, range, digits, sum);
  } else {
    sum_special(floats, digits, sum);
  }
}

template <class Type>
void widen_and_sum_block(const typename Type::Number* numbers, int digits, std::int64_t* sum) {
  float floats[kBlock];
  for (std::size_t i = 0; i < kBlock; i += kLanes<Type>) {
    write(Type::load(read_ahead<typename Type::Stored>(numbers + i, kLanes<Type>)), floats + i, kLanes<Type>);
  }
  sum_block(floats, digits, sum);
}

// Calls block(numbers) for each block; zeros fill up the last one.
template <class Number, class Block>
void for_blocks(const std::byte* bytes, std::size_t count, const Block& block) {
  const auto* numbers = reinterpret_cast<const Number*>(bytes);
  for (; count >= kBlock; count -= kBlock, numbers += kBlock) {
    block(numbers);
  }
  if (count > 0) {
    Number filled[kBlock] = {};
    for (std::size_t i = 0; i < count; ++i) {
      filled[i] = numbers[i];
    }
    block(filled);
  }
}

}  // namespace

void square_loop(const std::byte* bytes, Number type, std::size_t count, std::int64_t* sum) {
  // A square has twice as many bits as the number, or, of float64, is rounded to as many.
  switch (type) {
    case Number::float32:
      return for_blocks<float>(bytes, count, [=](const float* numbers) { sum_block(numbers, 2 * 23, sum); });
    case Number::float64:
      return for_blocks<double>(bytes, count, [=](const double* numbers) { sum_block(numbers, 52, sum); });
    case Number::bfloat16:
      return for_blocks<std::uint16_t>(
          bytes, count, [=](const std::uint16_t* numbers) { widen_and_sum_block<Bfloat16>(numbers, 2 * 7, sum); });
    case Number::float16:
      return for_blocks<std::uint16_t>(
          bytes, count, [=](const std::uint16_t* numbers) { widen_and_sum_block<Float16>(numbers, 2 * 10, sum); });
  }
}

}  // namespace trackbed::TRACKBED_LEVEL
