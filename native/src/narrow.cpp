#include "trackbed/narrow.hpp"

#include <utility>

namespace trackbed {

template <class Source, class Target>
std::size_t narrow(std::span<const Source> source, std::span<Target> target) {
  // One pass without a branch, so that the compiler uses vectors; a second one only where something is wrong.
  bool fits = true;
  for (std::size_t i = 0; i < source.size(); ++i) {
    target[i] = static_cast<Target>(source[i]);
    fits &= std::in_range<Target>(source[i]);
  }
  std::size_t first = fits ? source.size() : 0;
  while (first < source.size() && std::in_range<Target>(source[first])) {
    ++first;
  }
  return first;
}

#define TRACKBED_NARROW_TO(Source, Target) template std::size_t narrow(std::span<const Source>, std::span<Target>);
#define TRACKBED_NARROW_FROM(Source)        \
  TRACKBED_NARROW_TO(Source, std::uint8_t)  \
  TRACKBED_NARROW_TO(Source, std::int8_t)   \
  TRACKBED_NARROW_TO(Source, std::uint16_t) \
  TRACKBED_NARROW_TO(Source, std::int16_t)  \
  TRACKBED_NARROW_TO(Source, std::int32_t)  \
  TRACKBED_NARROW_TO(Source, std::int64_t)

TRACKBED_NARROW_FROM(std::int8_t)
TRACKBED_NARROW_FROM(std::uint8_t)
TRACKBED_NARROW_FROM(std::int16_t)
TRACKBED_NARROW_FROM(std::uint16_t)
TRACKBED_NARROW_FROM(std::int32_t)
TRACKBED_NARROW_FROM(std::uint32_t)
TRACKBED_NARROW_FROM(std::int64_t)
TRACKBED_NARROW_FROM(std::uint64_t)

}  // namespace trackbed
