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

int write_all(int descriptor, std::span<const std::byte> part, Poll& poll) {
  while (!part.empty()) {
    const ssize_t written = write(descriptor, part.data(), std::min(part.size(), kBytesPerCall));
    if (written < 0 && errno != EINTR) {
      return errno;
    }
    part = part.subspan(static_cast<std::size_t>(std::max<ssize_t>(written, 0)));
    poll(0);
  }
  return 0;
}

// Writes a few small parts by one system call. Sets how many bytes were written. Returns 0 or the errno.
int write_vector(int descriptor, std::span<const std::span<const std::byte>> parts, std::size_t& written) {
  std::array<iovec, 4> vector;
  std::size_t total = 0;
  for (const std::span<const std::byte> part : parts) {
    total += part.size();
  }
  if (parts.size() < 2 || parts.size() > vector.size() || total > kBytesPerCall) {
    return 0;
  }
  std::transform(parts.begin(), parts.end(), vector.begin(), [](std::span<const std::byte> part) {
    return iovec{.iov_base = const_cast<std::byte*>(part.data()), .iov_len = part.size()};
  });
  const ssize_t found = writev(descriptor, vector.data(), static_cast<int>(parts.size()));
  if (found < 0 && errno != EINTR) {
    return errno;
  }
  written = static_cast<std::size_t>(std::max<ssize_t>(found, 0));
  return 0;
}

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

int write_parts(const Descriptor& file, std::span<const std::span<const std::byte>> parts, Poll& poll) {
  std::size_t written = 0;
  int error = write_vector(file.number(), parts, written);
  for (const std::span<const std::byte> part : parts) {
    const std::size_t skipped = std::min(written, part.size());
    written -= skipped;
    error = error == 0 ? write_all(file.number(), part.subspan(skipped), poll) : error;
  }
  return error;
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
