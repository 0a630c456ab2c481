#include "trackbed/descriptor.hpp"

#include <fcntl.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace trackbed {
namespace {

constexpr std::size_t kBytesPerCall = 8 << 20;  // a few milliseconds at most between polls

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

// Writes a few small parts in one system call, possibly incompletely. Returns the errno, or 0.
int write_at_once(int descriptor, std::span<const std::span<const std::byte>> parts, std::size_t& written) {
  std::array<iovec, 4> pieces;
  std::size_t total = 0;
  for (const std::span<const std::byte> part : parts) {
    total += part.size();
  }
  if (parts.size() < 2 || parts.size() > pieces.size() || total > kBytesPerCall) {
    return 0;
  }
  std::transform(parts.begin(), parts.end(), pieces.begin(), [](std::span<const std::byte> part) {
    return iovec{.iov_base = const_cast<std::byte*>(part.data()), .iov_len = part.size()};
  });
  const ssize_t found = writev(descriptor, pieces.data(), static_cast<int>(parts.size()));
  if (found < 0 && errno != EINTR) {
    return errno;
  }
  written = static_cast<std::size_t>(std::max<ssize_t>(found, 0));
  return 0;
}

}  // namespace

Descriptor open_folder(const char* path) { return Descriptor(open(path, O_PATH | O_DIRECTORY | O_CLOEXEC)); }

int write_parts(const Descriptor& file, std::span<const std::span<const std::byte>> parts, Poll& poll) {
  std::size_t written = 0;  // bytes already written of the current part and those after it
  int error = write_at_once(file.number(), parts, written);
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

}  // namespace trackbed
