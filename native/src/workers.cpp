#include "trackbed/workers.hpp"

#include <unistd.h>

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace trackbed {

namespace {

// Time for which a thread spins before it sleeps: a few times the wakeup time of a thread, and the caller's time
// between two batches.
constexpr std::chrono::microseconds kLooking{200};

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Spins until `happened` returns true or the time is over.
template <class Happened>
void look_for(const Happened& happened) {
  constexpr int kLooks = 32;  // checks between two reads of the clock
  const auto end = std::chrono::steady_clock::now() + kLooking;
  while (!happened() && std::chrono::steady_clock::now() < end) {
    for (int look = 0; look < kLooks && !happened(); ++look) {
      pause();
    }
  }
}

}  // namespace

struct Workers::Job {
  // Aligned to separate cache lines, because each thread increments the counter of one.
  struct alignas(64) Part {
    std::atomic<std::int64_t> next;
    std::int64_t stop;
  };

  Job(std::int64_t count, int size, const Task& its_task)
      : task(its_task), vacancies(size - 1), parts(static_cast<std::size_t>(size)) {
    for (int thread = 0; thread < size; ++thread) {
      parts[static_cast<std::size_t>(thread)].next = count * thread / size;
      parts[static_cast<std::size_t>(thread)].stop = count * (thread + 1) / size;
    }
  }

  // Runs tasks until there are none: first those of the thread's own part, so that it writes the memory that it wrote
  // in the last call, then remaining ones of other parts (work stealing). Calls `between` after each.
  template <class Between>
  void work(int thread, const Between& between) {
    try {
      for (std::size_t turn = 0; turn < parts.size(); ++turn) {
        Part& part = parts[(static_cast<std::size_t>(thread) + turn) % parts.size()];
        for (std::int64_t number = part.next++; number < part.stop && !stopped; number = part.next++) {
          task(number);
          between();
        }
      }
    } catch (...) {
      stopped = true;
      const std::lock_guard lock(failure_mutex);
      if (!failure) {
        failure = std::current_exception();
      }
    }
  }

  const Task& task;
  int vacancies;  // number of threads that may still join, guarded by the crew's mutex
  std::atomic<int> present{0};
  std::atomic<bool> stopped{false};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  std::vector<Part> parts;
};

struct Workers::Crew {
  ~Crew() {
    {
      const std::lock_guard lock(mutex);
      is_over = true;
    }
    comes.notify_all();
    for (std::thread& thread : threads) {
      thread.join();
    }
  }

  // Starts threads until there are `size`, or until no more can be created.
  void grow(int size) {
    try {
      while (static_cast<int>(threads.size()) < size) {
        threads.emplace_back([this, thread = static_cast<int>(threads.size()) + 1] { serve(thread); });
      }
    } catch (const std::exception&) {
    }
  }

  void serve(int thread) {
    std::uint64_t seen = 0;
    while (true) {
      look_for([&] { return jobs != seen; });
      std::unique_lock lock(mutex);
      comes.wait(lock, [&] { return is_over || jobs != seen; });
      if (is_over) {
        return;
      }
      seen = jobs;
      Job* const its = job;
      if (its == nullptr || its->vacancies == 0) {
        continue;
      }
      --its->vacancies;
      ++its->present;
      lock.unlock();
      its->work(thread, [] {});
      lock.lock();
      --its->present;
      leaves.notify_all();
    }
  }

  void offer(Job& its) {
    {
      const std::lock_guard lock(mutex);
      job = &its;
      ++jobs;
    }
    comes.notify_all();
  }

  // Stops further threads from joining the job, and waits for those that have joined.
  void withdraw(Job& its) {
    std::unique_lock lock(mutex);
    job = nullptr;
    lock.unlock();
    look_for([&] { return its.present == 0; });
    lock.lock();
    leaves.wait(lock, [&] { return its.present == 0; });
  }

  std::mutex in_use;  // held by the thread that runs a job
  std::mutex mutex;   // guards the members below
  std::condition_variable comes;
  std::condition_variable leaves;
  std::atomic<std::uint64_t> jobs{0};
  Job* job = nullptr;
  bool is_over = false;
  std::vector<std::thread> threads;
};

Workers::Workers() : crew_(new Crew), process_(getpid()) {}

Workers::~Workers() {
  if (process_ == getpid()) {
    delete crew_;  // leaked in a forked child, which does not have the threads to join
  }
}

void Workers::run(std::int64_t count, int num_threads, Poll& poll, const Task& task) {
  const int size = static_cast<int>(num_threads < count ? num_threads : count);
  Job job(count, size > 0 ? size : 1, task);
  const auto look = [&] { poll(0); };
  std::unique_lock<std::mutex> use;
  if (size > 1 && process_ == getpid()) {
    use = std::unique_lock(crew_->in_use, std::try_to_lock);
  }
  if (use.owns_lock()) {
    crew_->grow(size - 1);
    crew_->offer(job);
    job.work(0, look);
    crew_->withdraw(job);
  } else {
    job.work(0, look);
  }
  if (job.failure) {
    std::rethrow_exception(job.failure);
  }
}

}  // namespace trackbed
