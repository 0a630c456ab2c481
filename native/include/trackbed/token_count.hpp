#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace trackbed {

struct TokenCount {
  std::int64_t tokens;    // in all documents together
  std::int32_t shortest;  // the smallest length, which is below 0 in a damaged file; 0 without any document
};

// What documents of these lengths hold: int32 numbers at any address, as an index file has them. They are read once.
// Requires: the size of `lengths` is a multiple of 4. O(N), bound by memory.
TokenCount count_tokens(std::span<const std::byte> lengths);

}  // namespace trackbed
