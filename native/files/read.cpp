#include "read.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "trackbed/parallel.hpp"

namespace trackbed::files {
namespace {

constexpr std::int64_t kFilesPerTask = 16;
constexpr std::size_t kFilesAhead = 16;

FileStamp read_stamp(const char* path) {
  struct stat status;
  if (stat(path, &status) == 0) {
    return stamp_of(status);
  }
  FileStamp none = kNoFile;
  if (errno != ENOENT && errno != ENOTDIR) {
    none.modified_ns = errno;
  }
  return none;
}

}  // namespace

void read_stamps(Names paths, std::span<FileStamp> stamps, int num_threads, Poll& poll) {
  const std::vector<const char*> starts = starts_of(paths, stamps.size());
  const auto count = static_cast<std::int64_t>(stamps.size());
  run_parallel((count + kFilesPerTask - 1) / kFilesPerTask, num_threads, poll, kFilesPerTask, [&](std::int64_t task) {
    for (std::int64_t file = task * kFilesPerTask; file < std::min(count, (task + 1) * kFilesPerTask); ++file) {
      stamps[static_cast<std::size_t>(file)] = read_stamp(starts[static_cast<std::size_t>(file)]);
    }
  });
}

void read_parts(Names paths, std::span<const std::int64_t> starts, std::span<const std::int64_t> sizes,
                std::span<std::byte> content, std::span<FileStamp> stamps, Poll& poll) {
  const std::vector<const char*> names = starts_of(paths, stamps.size());
  Descriptor ahead[kFilesAhead];
  for (std::size_t step = 0; step < stamps.size() + kFilesAhead; ++step) {
    Descriptor file = std::exchange(ahead[step % kFilesAhead], Descriptor());
    if (step < stamps.size()) {
      Descriptor& opened = ahead[step % kFilesAhead];
      opened = open_to_read(names[step]);
      if (opened && sizes[step] > 0) {
        posix_fadvise(opened.number(), starts[step], sizes[step], POSIX_FADV_WILLNEED);  // a hint
      }
    }
    if (step < kFilesAhead) {
      continue;
    }
    const std::size_t number = step - kFilesAhead;
    const auto part = content.first(static_cast<std::size_t>(sizes[number]));
    struct stat status;
    const bool is_read = file && fstat(file.number(), &status) == 0 && read_whole(file, part, starts[number]);
    stamps[number] = is_read ? stamp_of(status) : kNoFile;
    content = content.subspan(part.size());
    poll(static_cast<std::int64_t>(number) + 1);
  }
}

}  // namespace trackbed::files
