#include "trackbed/small_files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "trackbed/parallel.hpp"

namespace trackbed {
namespace {

constexpr std::int64_t kFilesPerTask = 256;

constexpr std::size_t kBytesPerCall = 8 << 20;  // a few milliseconds at most, then the poll is asked

struct Descriptor {
  int number;  // -1 is none

  explicit Descriptor(int opened) : number(opened) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number >= 0) {
      close(number);
    }
  }
};

// The number of the error, or 0.
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

int write_file(const char* name, std::span<const std::span<const std::byte>> parts, Poll& poll) {
  const Descriptor file(open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (file.number < 0) {
    return errno;
  }
  for (const std::span<const std::byte> part : parts) {
    if (const int error = write_all(file.number, part, poll); error != 0) {
      return error;
    }
  }
  return 0;
}

std::vector<const char*> starts_of(std::span<const char> names, std::size_t count) {
  std::vector<const char*> starts;
  starts.reserve(count);
  for (const char* name = names.data(); starts.size() < count; name += std::strlen(name) + 1) {
    starts.push_back(name);
  }
  return starts;
}

FileStamp stamp_of(int folder, const char* name) {
  struct stat status;
  if (fstatat(folder, name, &status, 0) != 0) {
    return {.inode = -1, .size_bytes = -1, .modified_ns = -1};
  }
  return {.inode = static_cast<std::int64_t>(status.st_ino),
          .size_bytes = static_cast<std::int64_t>(status.st_size),
          .modified_ns = std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec};
}

}  // namespace

FileError write_files(std::span<const char> names, std::span<const std::span<const std::byte>> parts,
                      std::span<const std::int64_t> counts, Poll& poll) {
  const std::vector<const char*> starts = starts_of(names, counts.size());
  for (std::size_t file = 0; file < counts.size(); ++file) {
    const auto count = static_cast<std::size_t>(counts[file]);
    if (const int error = write_file(starts[file], parts.first(count), poll); error != 0) {
      return {.number = error, .file = file};
    }
    parts = parts.subspan(count);
  }
  return {.number = 0, .file = 0};
}

void file_stamps(const char* folder, std::span<const char> names, std::span<FileStamp> stamps, int num_threads,
                 Poll& poll) {
  const std::vector<const char*> starts = starts_of(names, stamps.size());
  const Descriptor opened(open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC));  // without it only absolute names are found
  const auto count = static_cast<std::int64_t>(stamps.size());
  run_parallel((count + kFilesPerTask - 1) / kFilesPerTask, num_threads, poll, kFilesPerTask, [&](std::int64_t task) {
    for (std::int64_t file = task * kFilesPerTask; file < std::min(count, (task + 1) * kFilesPerTask); ++file) {
      stamps[static_cast<std::size_t>(file)] = stamp_of(opened.number, starts[static_cast<std::size_t>(file)]);
    }
  });
}

}  // namespace trackbed
