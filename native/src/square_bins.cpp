#include "trackbed/square_bins.hpp"

#include <algorithm>
#include <vector>

#include "trackbed/parallel.hpp"

namespace trackbed {

namespace {

constexpr std::size_t kTables = 8;
constexpr std::size_t kBlock = 256;
// Squares are below 2^48, so a table of 64 bits holds 2^16 of them; each takes every eighth number.
constexpr std::size_t kPerFold = kTables << 15;
constexpr std::size_t kPerTask = std::size_t{1} << 20;

void add_to_bin(SquareBins& bins, std::size_t exponent, std::uint64_t low, std::uint64_t high) {
  const std::uint64_t sum = bins.low[exponent] + low;
  bins.high[exponent] += high + (sum < low ? 1 : 0);
  bins.low[exponent] = sum;
}

using Tables = std::uint64_t[kTables][256];

// Adds the squares of at most kBlock numbers. The first loop is vectorized. In the second, neighbours are added to
// different tables: they often have the same exponent, and would wait for each other.
template <class Element>
void add_block(const Element* numbers, std::size_t count, Tables& tables) {
  std::uint64_t squares[kBlock];
  std::uint32_t exponents[kBlock];
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(numbers[i]) << (32 - 8 * sizeof(Element));
    exponents[i] = (bits >> 23) & 0xffU;
    const std::uint64_t mantissa = (bits & 0x7fffffU) | (exponents[i] != 0 ? 0x800000U : 0U);
    squares[i] = mantissa * mantissa;
  }
  std::size_t i = 0;
  for (; i + kTables <= count; i += kTables) {
    for (std::size_t table = 0; table < kTables; ++table) {
      tables[table][exponents[i + table]] += squares[i + table];
    }
  }
  for (; i < count; ++i) {
    tables[0][exponents[i]] += squares[i];
  }
}

template <class Element>
void add_numbers(std::span<const Element> numbers, SquareBins& bins) {
  while (!numbers.empty()) {
    const std::size_t count = std::min(numbers.size(), kPerFold);
    Tables tables{};
    for (std::size_t start = 0; start < count; start += kBlock) {
      add_block(numbers.data() + start, std::min(kBlock, count - start), tables);
    }
    for (const auto& table : tables) {
      for (std::size_t exponent = 0; exponent < 256; ++exponent) {
        add_to_bin(bins, exponent, table[exponent], 0);
      }
    }
    numbers = numbers.subspan(count);
  }
}

}  // namespace

template <class Element>
void add_squares(std::span<const Element> numbers, SquareBins& bins, int num_threads, Poll& poll) {
  const std::size_t num_tasks = (numbers.size() + kPerTask - 1) / kPerTask;
  std::vector<SquareBins> found(num_tasks);
  run_parallel(static_cast<std::int64_t>(num_tasks), num_threads, poll, kPerTask, [&](std::int64_t task) {
    const auto start = static_cast<std::size_t>(task) * kPerTask;
    add_numbers(numbers.subspan(start, std::min(kPerTask, numbers.size() - start)),
                found[static_cast<std::size_t>(task)]);
  });
  for (const SquareBins& part : found) {
    for (std::size_t exponent = 0; exponent < 256; ++exponent) {
      add_to_bin(bins, exponent, part.low[exponent], part.high[exponent]);
    }
  }
}

template void add_squares(std::span<const std::uint32_t>, SquareBins&, int, Poll&);
template void add_squares(std::span<const std::uint16_t>, SquareBins&, int, Poll&);

}  // namespace trackbed
