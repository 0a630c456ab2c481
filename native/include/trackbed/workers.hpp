#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "trackbed/poll.hpp"

namespace trackbed {

// Threads that stay for the next call: a batch takes as long as starting one would.
// They belong to the process that made them. In a forked child, and while another thread runs something on them, a
// call does its work on its own thread.
class Workers {
 public:
  using Task = std::function<void(std::int64_t)>;

  Workers();
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Calls task(0) to task(count - 1), once each, on at most num_threads threads, this one included. In which order, and
  // on which thread, must not matter. This thread polls between its own, with 0. When a task or the poll throws, no
  // other task is started, and the first exception is thrown here after all of them have ended.
  void run(std::int64_t count, int num_threads, Poll& poll, const Task& task);

 private:
  struct Job;
  struct Crew;

  Crew* crew_;
  long process_;
};

}  // namespace trackbed
