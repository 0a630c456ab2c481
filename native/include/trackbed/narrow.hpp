#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace trackbed {

// Converts `source` to `target`. Returns the index of the first number that does not fit Target, or source.size();
// `target` is undefined from there on.
// Requires: equal sizes, integer types. O(N), bound by memory bandwidth.
template <class Source, class Target>
std::size_t narrow(std::span<const Source> source, std::span<Target> target);

}  // namespace trackbed
