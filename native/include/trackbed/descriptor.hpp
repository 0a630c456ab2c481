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

// Owning file descriptor of an open file or folder, or none.
class Descriptor {
 public:
  explicit Descriptor(int opened = -1) : number_(opened) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);  // the destructor of `other` closes the old descriptor
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

// Opens a folder for lookups of names. Returns none if it cannot be opened.
Descriptor open_folder(const char* path);

// Writes the parts in order. Returns the errno, or 0.
int write_parts(const Descriptor& file, std::span<const std::span<const std::byte>> parts, Poll& poll);

FileStamp stamp_of(const struct stat& status);

// Start of each of `count` names.
std::vector<const char*> starts_of(Names names, std::size_t count);

}  // namespace trackbed
