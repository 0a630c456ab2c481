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

// Calls task(0) to task(count - 1) once each, on at most num_threads threads including the calling one. Tasks must not
// depend on their order or thread, and should take at most a few milliseconds: the calling thread polls between its
// tasks, with items_per_task times the number of leading tasks that are all done.
// If a task or the poll throws, no further task is started, and the first exception is rethrown after all threads have
// ended.
template <class Task>
void run_parallel(std::int64_t count, int num_threads, Poll& poll, std::int64_t items_per_task, const Task& task) {
  std::atomic<std::int64_t> next{0};
  // Current task of each thread, or the previous one while it takes the next: all tasks below the minimum are done.
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
    // No more threads can be created: the running ones do all tasks.
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
