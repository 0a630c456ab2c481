// Compiled once per instruction level, into the namespace TRACKBED_LEVEL. Must not use inline library code: the linker
// could pick a copy that was compiled here at a high level for all callers.

#include "number_lanes.hpp"
#include "trackbed/sum_ranks.hpp"

namespace trackbed::TRACKBED_LEVEL {

namespace {

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
