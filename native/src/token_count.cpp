#include "trackbed/token_count.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

namespace trackbed {

TokenCount count_tokens(std::span<const std::byte> lengths) {
  const std::size_t num_documents = lengths.size() / sizeof(std::int32_t);
  if (num_documents == 0) {
    return {.tokens = 0, .shortest = 0};
  }
  std::int64_t tokens = 0;
  std::int32_t shortest = std::numeric_limits<std::int32_t>::max();
  for (std::size_t document = 0; document < num_documents; ++document) {
    std::int32_t length;
    std::memcpy(&length, lengths.data() + document * sizeof length, sizeof length);
    tokens += length;
    shortest = std::min(shortest, length);
  }
  return {.tokens = tokens, .shortest = shortest};
}

}  // namespace trackbed
