#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace trackbed {

struct TokenCount {
  std::int64_t tokens;    // in all documents together
  std::int32_t shortest;  // the smallest length, below 0 in a damaged file; 0 without documents
};

// Counts the tokens of documents from their int32 lengths, which may be unaligned as in an index file.
// Requires: the size of `lengths` is a multiple of 4. O(N) in one pass, bound by memory bandwidth.
TokenCount count_tokens(std::span<const std::byte> lengths);

}  // namespace trackbed
