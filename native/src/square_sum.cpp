#include "trackbed/square_sum.hpp"

#include <algorithm>
#include <array>
#include <vector>

#include "trackbed/parallel.hpp"

namespace trackbed {

namespace {

std::size_t bytes_of(Number type) { return type == Number::float64 ? 8 : type == Number::float32 ? 4 : 2; }

// Carries, so that each digit is in [0, 2^32).
void carry(std::span<std::int64_t> digits) {
  std::int64_t over = 0;
  for (std::int64_t& digit : digits) {
    over += digit;
    digit = over & 0xffffffff;
    over >>= 32;
  }
}

}  // namespace

void square_sum(const std::byte* numbers, Number type, std::size_t count, std::span<std::int64_t> sum, Isa level,
                int num_threads, Poll& poll) {
  const SquareLoop loop = square_loop_at(level);
  const std::size_t num_tasks = (count + kSquareTask - 1) / kSquareTask;
  std::vector<std::array<std::int64_t, kSquareSumSize>> parts(num_tasks);
  run_parallel(static_cast<std::int64_t>(num_tasks), num_threads, poll, kSquareTask, [&](std::int64_t task) {
    const std::size_t start = static_cast<std::size_t>(task) * kSquareTask;
    auto& part = parts[static_cast<std::size_t>(task)];
    loop(numbers + start * bytes_of(type), type, std::min(count - start, kSquareTask), part.data());
    carry(std::span(part).first(kSquareDigits));
  });
  std::fill(sum.begin(), sum.end(), 0);
  for (const auto& part : parts) {
    for (std::size_t i = 0; i < kSquareSumSize; ++i) {
      sum[i] += part[i];
    }
  }
  const std::span<std::int64_t> digits = sum.first(kSquareDigits);
  carry(digits);
  if (sum[kSquareDigits] + sum[kSquareDigits + 1] > 0) {
    std::fill(digits.begin(), digits.end(), 0);
  }
}

}  // namespace trackbed
