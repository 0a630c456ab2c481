#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "trackbed/poll.hpp"
#include "trackbed/small_files.hpp"

namespace trackbed {

// An open file or folder, closed at the end; or none.
class Descriptor {
 public:
  explicit Descriptor(int opened = -1) : number_(opened) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);  // `other` is at its end, and closes what this one had
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) {
      close(number_);
    }
  }

  explicit operator bool() const { return number_ >= 0; }
  int number() const { return number_; }

 private:
  int number_;
};

// The folder, to look up names in; none where it cannot be opened.
Descriptor open_folder(const char* path);

// Writes these parts, one after the other. The number of the error, or 0.
int write_parts(const Descriptor& file, std::span<const std::span<const std::byte>> parts, Poll& poll);

FileStamp stamp_of(const struct stat& status);

// Where each of so many names starts.
std::vector<const char*> starts_of(Names names, std::size_t count);

}  // namespace trackbed
