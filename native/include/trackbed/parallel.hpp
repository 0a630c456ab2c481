#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "trackbed/poll.hpp"

namespace trackbed {

// Calls task(0) to task(count - 1), once each, on at most num_threads threads, this one included. In which order, and
// on which thread, must not matter. A task takes a few milliseconds at most: this thread polls between its own, with
// items_per_task times the number of tasks, from the first on, that are all done.
// When a task or the poll throws, no other task is started, and the first exception is thrown here after all threads
// have ended.
template <class Task>
void run_parallel(std::int64_t count, int num_threads, Poll& poll, std::int64_t items_per_task, const Task& task) {
  std::atomic<std::int64_t> next{0};
  // The task that each thread is at, or was before it took another: those below all of them are done.
  std::vector<std::atomic<std::int64_t>> present(static_cast<std::size_t>(std::max(num_threads, 1)));
  std::atomic<bool> stopped{false};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  const auto work = [&](std::size_t thread, const auto& between) {
    try {
      for (std::int64_t number = next++; number < count && !stopped; number = next++) {
        present[thread] = number;
        task(number);
        between();
      }
      present[thread] = count;
    } catch (...) {
      stopped = true;
      const std::lock_guard lock(failure_mutex);
      if (!failure) {
        failure = std::current_exception();
      }
    }
  };
  std::vector<std::thread> others;
  try {
    for (std::int64_t thread = 1; thread < std::min<std::int64_t>(num_threads, count); ++thread) {
      others.emplace_back([&, thread] { work(static_cast<std::size_t>(thread), [] {}); });
    }
  } catch (const std::exception&) {
    // The system gives no more threads: those that run do it all.
  }
  for (std::size_t missing = others.size() + 1; missing < present.size(); ++missing) {
    present[missing] = count;
  }
  work(0, [&] {
    const auto behind = std::min_element(present.begin(), present.end(),
                                         [](const auto& one, const auto& other) { return one.load() < other.load(); });
    poll(behind->load() * items_per_task);
  });
  for (std::thread& other : others) {
    other.join();
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

}  // namespace trackbed
