// Compiled once per instruction level, into the namespace TRACKBED_LEVEL. Must not use inline library code: the linker
// could pick a copy that was compiled here at a high level for all callers.

#include "trackbed/sum_ranks.hpp"

namespace trackbed::TRACKBED_LEVEL {

namespace {

struct Float32 {
  using Stored = float;
  using Wide = float;
  static Wide load(Stored stored) { return stored; }
  static Stored store(Wide wide) { return wide; }
};

struct Float64 {
  using Stored = double;
  using Wide = double;
  static Wide load(Stored stored) { return stored; }
  static Stored store(Wide wide) { return wide; }
};

struct Bfloat16 {
  using Stored = std::uint16_t;
  using Wide = float;
  static Wide load(Stored stored) { return __builtin_bit_cast(float, static_cast<std::uint32_t>(stored) << 16); }
  // Rounds to nearest, ties to even.
  static Stored store(Wide wide) {
    const auto bits = __builtin_bit_cast(std::uint32_t, wide);
    const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    return static_cast<Stored>((bits & 0x7fffffffU) > 0x7f800000U ? 0x7fc0U : rounded);
  }
};

struct Float16 {
  using Stored = std::uint16_t;
  using Wide = float;
  static Wide load(Stored stored) {
    const std::uint32_t sign = (static_cast<std::uint32_t>(stored) & 0x8000U) << 16;
    const std::uint32_t rest = stored & 0x7fffU;
    const std::uint32_t normal = (rest << 13) + (112U << 23);
    const auto subnormal =
        __builtin_bit_cast(std::uint32_t, static_cast<float>(static_cast<std::int32_t>(rest)) * 0x1p-24F);
    const std::uint32_t special = (rest << 13) | 0x7f800000U;
    return __builtin_bit_cast(float, sign | (rest < 0x400U ? subnormal : rest < 0x7c00U ? normal : special));
  }
  // Rounds to nearest, ties to even.
  static Stored store(Wide wide) {
    const auto bits = __builtin_bit_cast(std::uint32_t, wide);
    const std::uint32_t sign = (bits >> 16) & 0x8000U;
    const std::uint32_t rest = bits & 0x7fffffffU;
    const std::uint32_t normal = (rest + ((15U - 127U) << 23) + 0xfffU + ((rest >> 13) & 1U)) >> 13;
    constexpr std::uint32_t kHalf = 126U << 23;  // adding 0.5 leaves the bits of a subnormal at the end of the sum
    const std::uint32_t subnormal =
        __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, rest) + __builtin_bit_cast(float, kHalf)) - kHalf;
    const std::uint32_t special = rest > 0x7f800000U ? 0x7e00U : 0x7c00U;
    return static_cast<Stored>(sign | (rest < (113U << 23) ? subnormal : rest < (143U << 23) ? normal : special));
  }
};

// Multiplies, and rounds to the stored type.
template <class Type, bool scales>
typename Type::Wide product(typename Type::Stored stored, typename Type::Wide factor) {
  if constexpr (scales) {
    return Type::load(Type::store(Type::load(stored) * factor));
  } else {
    return Type::load(stored);
  }
}

// Stores the sum in `target`, and in `other` too, or else leaves its product there.
template <class Type, bool scales, bool divides, bool both>
void sum_two(typename Type::Stored* __restrict target, typename Type::Stored* __restrict other, std::size_t count,
             typename Type::Wide factor, typename Type::Wide divisor) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto one = product<Type, scales>(target[i], factor);
    const auto two = product<Type, scales>(other[i], factor);
    const auto sum = Type::store(divides ? (one + two) / divisor : one + two);
    target[i] = sum;
    if constexpr (both) {
      other[i] = sum;
    } else if constexpr (scales) {
      other[i] = Type::store(two);
    }
  }
}

// Adds the products of one rank to a row, or begins the row with them.
template <class Type, bool scales>
void add_row(typename Type::Stored* __restrict stored, typename Type::Wide* __restrict row, std::size_t count,
             typename Type::Wide factor, bool begins, bool keeps) {
  if (begins) {
    for (std::size_t i = 0; i < count; ++i) {
      row[i] = product<Type, scales>(stored[i], factor);
    }
  } else {
    for (std::size_t i = 0; i < count; ++i) {
      row[i] += product<Type, scales>(stored[i], factor);
    }
  }
  if (scales && keeps) {
    for (std::size_t i = 0; i < count; ++i) {
      stored[i] = Type::store(Type::load(stored[i]) * factor);
    }
  }
}

template <class Type, bool scales>
void sum_many(const RankSum& sum, std::size_t start, std::size_t count, std::byte* rows) {
  using Wide = typename Type::Wide;
  using Stored = typename Type::Stored;
  const auto factor = static_cast<Wide>(sum.factor);
  const auto divisor = static_cast<Wide>(sum.divisor);
  std::byte* const* const buffers = sum.buffers;
  const std::size_t num_ranks = sum.num_ranks;
  const auto row = [&](std::size_t number) { return reinterpret_cast<Wide*>(rows + number * kSumRowBytes); };
  const std::size_t half = (num_ranks + 1) / 2;
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    const bool keeps = sum.owner < num_ranks && rank != sum.owner;
    add_row<Type, scales>(reinterpret_cast<Stored*>(buffers[rank]) + start, row(rank < half ? rank : rank - half),
                          count, factor, rank < half, keeps);
  }
  for (std::size_t left = half; left > 1; left = (left + 1) / 2) {
    const std::size_t middle = (left + 1) / 2;
    for (std::size_t rank = middle; rank < left; ++rank) {
      Wide* const target = row(rank - middle);
      const Wide* const source = row(rank);
      for (std::size_t i = 0; i < count; ++i) {
        target[i] += source[i];
      }
    }
  }
  const Wide* const total = row(0);
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    if (sum.owner < num_ranks && rank != sum.owner) {
      continue;
    }
    Stored* const stored = reinterpret_cast<Stored*>(buffers[rank]) + start;
    for (std::size_t i = 0; i < count; ++i) {
      stored[i] = Type::store(total[i] / divisor);
    }
  }
}

template <class Type, bool scales>
void sum_scaled(const RankSum& sum, std::size_t start, std::size_t stop, std::byte* rows) {
  using Wide = typename Type::Wide;
  using Stored = typename Type::Stored;
  if (sum.num_ranks == 2) {
    auto* const target = reinterpret_cast<Stored*>(sum.buffers[sum.owner == 1 ? 1 : 0]) + start;
    auto* const other = reinterpret_cast<Stored*>(sum.buffers[sum.owner == 1 ? 0 : 1]) + start;
    const auto factor = static_cast<Wide>(sum.factor);
    const auto divisor = static_cast<Wide>(sum.divisor);
    const bool both = sum.owner >= 2;
    const auto loop = divisor == 1 ? (both ? sum_two<Type, scales, false, true> : sum_two<Type, scales, false, false>)
                                   : (both ? sum_two<Type, scales, true, true> : sum_two<Type, scales, true, false>);
    loop(target, other, stop - start, factor, divisor);
    return;
  }
  constexpr std::size_t kBlock = kSumRowBytes / sizeof(Wide);
  for (; start < stop; start += kBlock) {
    sum_many<Type, scales>(sum, start, stop - start < kBlock ? stop - start : kBlock, rows);
  }
}

template <class Type>
void sum_type(const RankSum& sum, std::size_t start, std::size_t stop, std::byte* rows) {
  (sum.factor == 1 ? sum_scaled<Type, false> : sum_scaled<Type, true>)(sum, start, stop, rows);
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
