#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace trackbed {

// Runs work(thread, size, barrier) once on each of `size` threads that share a barrier. `size` is at most num_threads
// and at least 1; the calling thread is thread 0. `work` must not throw, and all threads must arrive at the barrier
// equally often. Returns once all threads have ended.
template <class Work>
void run_team(std::int64_t num_threads, const Work& work) {
  std::atomic<std::int64_t> size{0};  // 0 until the number of threads that could be created is known
  std::barrier<> barrier(static_cast<std::ptrdiff_t>(std::max<std::int64_t>(num_threads, 1)));
  std::vector<std::jthread> others;  // joined before their barrier is destroyed
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
