#include "shared_counters.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <ctime>
#include <limits>

namespace trackbed::comm {

namespace {

constexpr int kSpins = 200;  // a few microseconds: less than a sleep costs

bool has_reached(std::uint32_t found, std::uint32_t count) { return static_cast<std::int32_t>(found - count) >= 0; }

// Sleeps while the word still has the value `seen`, for at most 50 ms.
void sleep_while(std::uint32_t* word, std::uint32_t seen) {
  const timespec slice{0, 50'000'000};
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &slice, nullptr, 0);
}

}  // namespace

void set_counter(std::span<std::uint32_t> words, std::size_t index, std::uint32_t count) {
  std::uint32_t* const word = &words[index * kCounterWords];
  std::atomic_ref(*word).store(count, std::memory_order_seq_cst);
  syscall(SYS_futex, word, FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

void wait_for_counters(std::span<std::uint32_t> words, std::size_t first, std::size_t number, std::uint32_t count,
                       Poll& poll) {
  for (std::size_t index = first; index < first + number; ++index) {
    std::uint32_t* const word = &words[index * kCounterWords];
    const std::atomic_ref shared(*word);
    int spins = 0;
    for (std::uint32_t seen = shared.load(std::memory_order_acquire); !has_reached(seen, count);
         seen = shared.load(std::memory_order_acquire)) {
      if (++spins > kSpins) {
        sleep_while(word, seen);
        poll(0);
      }
    }
  }
}

}  // namespace trackbed::comm
