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

// Thread pool that is kept between calls, because starting a thread takes as long as a batch.
// The threads belong to the process that created the pool. In a forked child, and while another thread uses the pool,
// a call runs all tasks on the calling thread.
class Workers {
 public:
  using Task = std::function<void(std::int64_t)>;

  Workers();
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Calls task(0) to task(count - 1) once each, on at most num_threads threads including the calling one. Tasks must
  // not depend on their order or thread. The calling thread polls with 0 between its tasks. If a task or the poll
  // throws, no further task is started, and the first exception is rethrown after all running tasks have ended.
  void run(std::int64_t count, int num_threads, Poll& poll, const Task& task);

 private:
  struct Job;
  struct Crew;

  Crew* crew_;
  long process_;
};

}  // namespace trackbed
