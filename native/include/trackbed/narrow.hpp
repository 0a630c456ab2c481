#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace trackbed {

// Copies `source` to `target`, and says which number is the first that Target cannot hold: source.size() if
// it holds them all. What stands in `target` from there on means nothing.
// Requires: equal sizes, integer types. O(N), bound by memory.
template <class Source, class Target>
std::size_t narrow(std::span<const Source> source, std::span<Target> target);

}  // namespace trackbed
