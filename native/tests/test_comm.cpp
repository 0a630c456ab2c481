// Tests of the counters in shared memory, between threads and between processes.

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "shared_counters.hpp"

namespace {

using trackbed::Poll;
using trackbed::comm::kCounterWords;
using trackbed::comm::set_counter;
using trackbed::comm::wait_for_counters;

long passed = 0;
long failed = 0;

void check(bool holds, const std::string& what) {
  ++(holds ? passed : failed);
  if (!holds) {
    std::printf("FAILED %s\n", what.c_str());
  }
}

double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

std::vector<std::uint32_t> new_words(std::size_t counters, std::uint32_t count) {
  std::vector<std::uint32_t> words(counters * kCounterWords, 0);
  for (std::size_t i = 0; i < counters; ++i) {
    words[i * kCounterWords] = count;
  }
  return words;
}

void test_a_count_that_is_reached_needs_no_wait() {
  std::vector<std::uint32_t> words = new_words(3, 7);
  Poll poll;
  wait_for_counters(words, 0, 3, 7, poll);
  wait_for_counters(words, 0, 3, 5, poll);
  wait_for_counters(words, 1, 0, 99, poll);
  check(words[kCounterWords] == 7 && words[1] == 0, "waiting changes no counter");
}

void test_counts_wrap_around() {
  std::vector<std::uint32_t> words = new_words(1, 0xffffffffU);
  Poll poll;
  wait_for_counters(words, 0, 1, 0xfffffff0U, poll);
  std::thread other([&] { set_counter(words, 0, 2); });
  wait_for_counters(words, 0, 1, 1, poll);  // 0xffffffff is before 1
  other.join();
  check(words[0] == 2, "a wait passes 2^32");
}

// Each thread writes its cell, counts, and waits for all: no cell may be old. The sanitizer of threads checks that too.
void test_what_was_written_before_is_visible() {
  constexpr std::size_t kThreads = 3;
  constexpr std::uint32_t kRounds = 2000;
  const std::uint32_t begin = 0U - kRounds;  // the rounds pass 2^32
  std::vector<std::uint32_t> words = new_words(2 * kThreads, begin);
  std::vector<std::uint32_t> cells(kThreads, 0);
  std::atomic<long> wrong{0};
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < kThreads; ++rank) {
    threads.emplace_back([&, rank] {
      Poll poll;
      for (std::uint32_t round = 1; round <= 2 * kRounds; ++round) {
        cells[rank] = round;
        set_counter(words, rank, begin + round);
        wait_for_counters(words, 0, kThreads, begin + round, poll);
        for (const std::uint32_t cell : cells) {
          wrong += cell != round;
        }
        set_counter(words, kThreads + rank, begin + round);
        wait_for_counters(words, kThreads, kThreads, begin + round, poll);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  check(wrong == 0, "threads see what others wrote before they counted");
}

void test_a_waiter_sleeps_and_wakes_at_once() {
  std::vector<std::uint32_t> words = new_words(1, 0);
  std::chrono::steady_clock::time_point set_at;
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    set_at = std::chrono::steady_clock::now();
    set_counter(words, 0, 1);
  });
  Poll poll;
  const double before = cpu_seconds();
  wait_for_counters(words, 0, 1, 1, poll);
  const double spent = cpu_seconds() - before;
  const auto woken = std::chrono::steady_clock::now();
  other.join();
  check(spent < 0.1, "a waiter takes no time of the processor, but took " + std::to_string(spent) + " s");
  check(woken - set_at < std::chrono::milliseconds(300), "a waiter wakes");
}

void test_an_exception_of_the_poll_ends_the_wait() {
  std::vector<std::uint32_t> words = new_words(2, 1);
  words[kCounterWords] = 0;
  bool caught = false;
  Poll poll([](std::int64_t) { throw std::runtime_error("stop"); });
  try {
    wait_for_counters(words, 0, 2, 1, poll);
  } catch (const std::runtime_error&) {
    caught = true;
  }
  check(caught, "an exception of the poll ends the wait");
}

void test_processes_meet() {
  constexpr std::size_t kBytes = 4096;
  constexpr std::uint32_t kRounds = 500;
  void* const memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  const std::span words(static_cast<std::uint32_t*>(memory), kBytes / sizeof(std::uint32_t));
  const std::size_t cell = 3 * kCounterWords;
  const auto take_turns = [&](std::size_t own) {
    Poll poll;
    for (std::uint32_t round = 1; round <= kRounds; ++round) {
      if (own == 0) {
        words[cell] += 1;
        set_counter(words, 0, round);
        wait_for_counters(words, 1, 1, round, poll);
      } else {
        wait_for_counters(words, 0, 1, round, poll);
        words[cell] += 1;
        set_counter(words, 1, round);
      }
    }
  };
  const pid_t child = fork();
  if (child == 0) {
    take_turns(1);
    _exit(0);
  }
  take_turns(0);
  int status = 1;
  waitpid(child, &status, 0);
  check(status == 0 && words[cell] == 2 * kRounds, "processes take turns");
  munmap(memory, kBytes);
}

}  // namespace

int main() {
  test_processes_meet();  // first, because a process with threads should not fork
  test_a_count_that_is_reached_needs_no_wait();
  test_counts_wrap_around();
  test_what_was_written_before_is_visible();
  test_a_waiter_sleeps_and_wakes_at_once();
  test_an_exception_of_the_poll_ends_the_wait();
  std::printf("%ld passed, %ld failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
