#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "trackbed/poll.hpp"

namespace trackbed::files {

// File names, one after the other, each ended by a zero byte.
using Names = std::span<const char>;
// Consecutive parts of the content of a file.
using Parts = std::span<const std::span<const std::byte>>;

// Identity and version of a file. If there is none, all fields are -1; if it cannot be examined, the first two are -1
// and the last is the errno.
struct FileStamp {
  std::int64_t inode;
  std::int64_t size_bytes;
  std::int64_t modified_ns;  // since 1970
};

constexpr FileStamp kNoFile{.inode = -1, .size_bytes = -1, .modified_ns = -1};

// Owns a file descriptor, or none.
class Descriptor {
 public:
  explicit Descriptor(int opened = -1) : number_(opened) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);  // the destructor of `other` closes the old one
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

// Opens a file without waiting, even if it is a pipe. None if it cannot be opened: errno says why.
Descriptor open_to_read(const char* path);

// True if the whole part was read; else errno is set, to EIO if the file ends too soon, or to EINTR by a signal.
bool read_whole(const Descriptor& file, std::span<std::byte> part, std::int64_t start);

// Writes the parts one after the other. Returns 0 or the errno.
int write_parts(const Descriptor& file, Parts parts, Poll& poll);

FileStamp stamp_of(const struct stat& status);

// Start of each of `count` names.
std::vector<const char*> starts_of(Names names, std::size_t count);

}  // namespace trackbed::files
