#include "trackbed/narrow.hpp"

#include <type_traits>
#include <utility>

namespace trackbed {

template <class Source, class Target>
std::size_t narrow(std::span<const Source> source, std::span<Target> target) {
  // The first pass only collects bits, so that the compiler vectorizes it at every level; a second pass runs only if a
  // number does not fit. A number fits if it survives the round trip to Target, and its sign is the same in both types.
  using Bits = std::make_unsigned_t<Source>;
  Bits lost = 0;
  Source sources = 0;
  Target targets = 0;
  for (std::size_t i = 0; i < source.size(); ++i) {
    const auto stored = static_cast<Target>(source[i]);
    target[i] = stored;
    lost = static_cast<Bits>(lost | (static_cast<Bits>(source[i]) ^ static_cast<Bits>(static_cast<Source>(stored))));
    sources = static_cast<Source>(sources | source[i]);
    targets = static_cast<Target>(targets | stored);
  }
  bool fits = lost == 0;
  if constexpr (std::is_signed_v<Source> != std::is_signed_v<Target>) {
    fits = fits && !std::cmp_less(sources, 0) && !std::cmp_less(targets, 0);
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
