#include "system.hpp"

#include <fcntl.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace trackbed::files {
namespace {

constexpr std::size_t kBytesPerCall = 8 << 20;  // a few milliseconds at most between two polls

}  // namespace

Descriptor open_to_read(const char* path) { return Descriptor(open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK)); }

bool read_whole(const Descriptor& file, std::span<std::byte> part, std::int64_t start) {
  while (!part.empty()) {
    const ssize_t found = pread(file.number(), part.data(), part.size(), start);
    if (found <= 0) {
      errno = found == 0 ? EIO : errno;
      return false;
    }
    part = part.subspan(static_cast<std::size_t>(found));
    start += found;
  }
  return true;
}

int write_parts(const Descriptor& file, Parts parts, Poll& poll) {
  std::size_t written = 0;  // of the first part
  while (!parts.empty()) {
    std::array<iovec, 4> vector;  // most files have two small parts: one call writes both
    std::size_t count = 0;
    for (std::size_t left = kBytesPerCall; count < std::min(parts.size(), vector.size()) && left > 0; ++count) {
      const auto part = parts[count].subspan(count == 0 ? written : 0);
      const std::size_t size = std::min(part.size(), left);
      vector[count] = {.iov_base = const_cast<std::byte*>(part.data()), .iov_len = size};
      left -= size;
    }
    const ssize_t found = writev(file.number(), vector.data(), static_cast<int>(count));
    if (found < 0 && errno != EINTR) {
      return errno;
    }
    written += static_cast<std::size_t>(std::max<ssize_t>(found, 0));
    for (; !parts.empty() && written >= parts.front().size(); parts = parts.subspan(1)) {
      written -= parts.front().size();
    }
    poll(0);
  }
  return 0;
}

FileStamp stamp_of(const struct stat& status) {
  return {.inode = static_cast<std::int64_t>(status.st_ino),
          .size_bytes = static_cast<std::int64_t>(status.st_size),
          .modified_ns = std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec};
}

std::vector<const char*> starts_of(Names names, std::size_t count) {
  std::vector<const char*> starts;
  starts.reserve(count);
  for (const char* name = names.data(); starts.size() < count; name += std::strlen(name) + 1) {
    starts.push_back(name);
  }
  return starts;
}

}  // namespace trackbed::files
