#pragma once

#include <cstdint>

namespace trackbed {

// Word `number` of the SplitMix64 stream that starts at `start` (Steele, Lea and Flood, 2014).
inline std::uint64_t split_mix(std::uint64_t start, std::uint64_t number) {
  std::uint64_t word = start + 0x9e3779b97f4a7c15 * (number + 1);
  word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
  word = (word ^ word >> 27) * 0x94d049bb133111eb;
  return word ^ word >> 31;
}

}  // namespace trackbed
