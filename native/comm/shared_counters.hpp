#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "trackbed/poll.hpp"

namespace trackbed::comm {

// Counters in memory that several processes map, 64 bytes apart, so that no two share a cache line. A counter is the
// first 32-bit word of its line; counts wrap around, and are compared by their difference.

inline constexpr std::size_t kCounterWords = 16;

// Sets counter `index` and wakes the processes that wait for it. What this process wrote to shared memory before is
// visible to a process that has seen the new count.
// Requires: index < words.size() / kCounterWords.
void set_counter(std::span<std::uint32_t> words, std::size_t index, std::uint32_t count);

// Sleeps until each of the counters `first` to `first + number - 1` has reached `count`, and calls `poll` every 50 ms.
// Requires: first + number <= words.size() / kCounterWords; no counter is more than 2^31 counts away.
void wait_for_counters(std::span<std::uint32_t> words, std::size_t first, std::size_t number, std::uint32_t count,
                       Poll& poll);

}  // namespace trackbed::comm
