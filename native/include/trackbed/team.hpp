#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace trackbed {

// Threads that work in step. Each calls work(thread, size, barrier) once, where `size` is how many there are, at most
// num_threads and at least this one, which is thread 0. None may throw, and all must come to the barrier equally often.
// Returns once all have ended.
template <class Work>
void run_team(std::int64_t num_threads, const Work& work) {
  std::atomic<std::int64_t> size{0};  // 0 until it is known how many threads the system gives
  std::barrier<> barrier(static_cast<std::ptrdiff_t>(std::max<std::int64_t>(num_threads, 1)));
  std::vector<std::jthread> others;  // joined before the barrier that they use is gone
  others.reserve(static_cast<std::size_t>(std::max<std::int64_t>(num_threads, 1)));
  try {
    for (std::int64_t thread = 1; thread < num_threads; ++thread) {
      others.emplace_back([&, thread] {
        size.wait(0);
        work(thread, size.load(), barrier);
      });
    }
  } catch (const std::exception&) {
    for (std::int64_t missing = static_cast<std::int64_t>(others.size()) + 1; missing < num_threads; ++missing) {
      barrier.arrive_and_drop();
    }
  }
  size = static_cast<std::int64_t>(others.size()) + 1;
  size.notify_all();
  work(0, size.load(), barrier);
}

}  // namespace trackbed
