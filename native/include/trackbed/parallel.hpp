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
// the number of tasks that are done times items_per_task.
// When a task or the poll throws, no other task is started, and the first exception is thrown here after all threads
// have ended.
template <class Task>
void run_parallel(std::int64_t count, int num_threads, Poll& poll, std::int64_t items_per_task, const Task& task) {
  std::atomic<std::int64_t> next{0};
  std::atomic<std::int64_t> done{0};
  std::atomic<bool> stopped{false};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  const auto work = [&](const auto& between) {
    try {
      for (std::int64_t number = next++; number < count && !stopped; number = next++) {
        task(number);
        between(++done);
      }
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
      others.emplace_back([&] { work([](std::int64_t) {}); });
    }
  } catch (const std::exception&) {
    // The system gives no more threads: those that run do it all.
  }
  work([&](std::int64_t ready) { poll(ready * items_per_task); });
  for (std::thread& other : others) {
    other.join();
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

}  // namespace trackbed
