#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>

namespace trackbed {

// Rate-limited progress callback of a kernel. A kernel calls it at least every few milliseconds with the number of
// items done, and it calls the callback every 20 ms. An exception of the callback ends the kernel, whose outputs are
// then undefined. A call costs a few dozen nanoseconds.
class Poll {
 public:
  Poll() = default;
  explicit Poll(std::function<void(std::int64_t)> look) : look_(std::move(look)) {}

  void operator()(std::int64_t done) {
    if (look_) {
      const auto now = std::chrono::steady_clock::now();
      if (now - last_ >= std::chrono::milliseconds(20)) {
        last_ = now;
        look_(done);
      }
    }
  }

 private:
  std::function<void(std::int64_t)> look_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace trackbed
