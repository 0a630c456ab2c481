// Compiled once per instruction level, into the namespace TRACKBED_LEVEL. Must not use inline library code: the linker
// could pick a copy that was compiled here at a high level for all callers.

#include "trackbed/gather_loops.hpp"

namespace trackbed::TRACKBED_LEVEL {

namespace {

using Wide = std::int64_t __attribute__((vector_size(TRACKBED_LANE_BYTES), may_alias));
constexpr std::size_t kLanes = TRACKBED_LANE_BYTES / sizeof(std::int64_t);

// Widens tokens as stored in a file.
template <class Token>
using Anywhere [[gnu::aligned(1), gnu::may_alias]] = Token;

template <class Token>
Wide widen_lanes(const Anywhere<Token>* tokens) {
  Wide wide;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    wide[lane] = static_cast<std::int64_t>(tokens[lane]);
  }
  return wide;
}

// Stores full registers at addresses where they do not cross a cache line.
template <class Token>
void widen_type(const std::byte* tokens, std::size_t count, std::int64_t* target) {
  const auto* const source = reinterpret_cast<const Anywhere<Token>*>(tokens);
  std::size_t i = 0;
  for (; i < count && reinterpret_cast<std::uintptr_t>(target + i) % sizeof(Wide) != 0; ++i) {
    target[i] = static_cast<std::int64_t>(source[i]);
  }
  for (; i + kLanes <= count; i += kLanes) {
    *reinterpret_cast<Wide*>(target + i) = widen_lanes<Token>(source + i);
  }
  for (; i < count; ++i) {
    target[i] = static_cast<std::int64_t>(source[i]);
  }
}

}  // namespace

void widen(std::int64_t dtype, const std::byte* tokens, std::size_t count, std::int64_t* target) {
  switch (dtype) {
    case 1:
      return widen_type<std::uint8_t>(tokens, count, target);
    case 2:
      return widen_type<std::int8_t>(tokens, count, target);
    case 3:
      return widen_type<std::int16_t>(tokens, count, target);
    case 4:
      return widen_type<std::int32_t>(tokens, count, target);
    case 5:
      return widen_type<std::int64_t>(tokens, count, target);
    default:
      return widen_type<std::uint16_t>(tokens, count, target);
  }
}

void mask(std::int64_t* __restrict tokens, std::int64_t* __restrict labels, std::size_t count, std::int64_t pad,
          std::int64_t masked, bool is_masked, float* __restrict mask) {
  for (std::size_t i = 0; i < count; ++i) {
    const bool is_left_out = (labels[i] == pad) | (is_masked & (tokens[i] == masked));
    mask[i] = is_left_out ? 0.0F : 1.0F;
    tokens[i] = tokens[i] == pad ? 0 : tokens[i];
    labels[i] = labels[i] == pad ? 0 : labels[i];
  }
}

void keep_all(std::size_t count, float* mask) {
  for (std::size_t i = 0; i < count; ++i) {
    mask[i] = 1.0F;
  }
}

void count_up(std::int64_t* numbers, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    numbers[i] = static_cast<std::int64_t>(i);
  }
}

std::size_t find(const std::int64_t* numbers, std::size_t count, std::int64_t wanted) {
  constexpr std::size_t kBlock = 32;
  std::size_t at = 0;
  for (; at + kBlock <= count; at += kBlock) {
    std::int64_t is_here = 0;
    for (std::size_t i = 0; i < kBlock; ++i) {
      is_here |= numbers[at + i] == wanted;
    }
    if (is_here != 0) {
      break;
    }
  }
  while (at < count && numbers[at] != wanted) {
    ++at;
  }
  return at;
}

}  // namespace trackbed::TRACKBED_LEVEL
