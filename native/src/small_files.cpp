#include "trackbed/small_files.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "trackbed/descriptor.hpp"
#include "trackbed/parallel.hpp"

namespace trackbed {
namespace {

constexpr std::int64_t kFilesPerTask = 16;
constexpr std::size_t kFilesAhead = 16;

// Returns the errno, or 0.
int write_file(const char* path, std::span<const std::span<const std::byte>> parts, Poll& poll) {
  const Descriptor file(open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  return file ? write_parts(file, parts, poll) : errno;
}

constexpr FileStamp kNone{.inode = -1, .size_bytes = -1, .modified_ns = -1};

// Stamp of a file, and its change time if `changed_ns` is not null.
FileStamp look_at(int folder, const char* name, std::int64_t* changed_ns) {
  struct stat status;
  const bool is_there = fstatat(folder, name, &status, 0) == 0;
  if (changed_ns != nullptr) {
    *changed_ns = is_there ? std::int64_t{status.st_ctim.tv_sec} * 1'000'000'000 + status.st_ctim.tv_nsec : -1;
  }
  return is_there ? stamp_of(status) : kNone;
}

// Opens a file, and starts reading its range into the page cache.
Descriptor open_ahead(const char* path, std::int64_t start, std::int64_t size) {
  // Nonblocking, because opening a pipe would otherwise wait for a writer.
  Descriptor file(open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file && size > 0) {
    posix_fadvise(file.number(), start, size, POSIX_FADV_WILLNEED);  // a hint
  }
  return file;
}

// Reads a range. Returns false if it was not read completely.
bool read_whole(const Descriptor& file, std::span<std::byte> part, std::int64_t start) {
  while (!part.empty()) {
    const ssize_t found = pread(file.number(), part.data(), part.size(), start);
    if (found == 0 || (found < 0 && errno != EINTR)) {
      return false;
    }
    part = part.subspan(static_cast<std::size_t>(std::max<ssize_t>(found, 0)));
    start += std::max<ssize_t>(found, 0);
  }
  return true;
}

}  // namespace

void read_parts(Names paths, std::span<const std::int64_t> starts, std::span<const std::int64_t> sizes,
                std::span<std::byte> content, std::span<FileStamp> stamps, Poll& poll) {
  const std::vector<const char*> names = starts_of(paths, stamps.size());
  Descriptor ahead[kFilesAhead];
  for (std::size_t step = 0; step < stamps.size() + kFilesAhead; ++step) {
    Descriptor file = std::exchange(ahead[step % kFilesAhead], Descriptor());
    if (step < stamps.size()) {
      ahead[step % kFilesAhead] = open_ahead(names[step], starts[step], sizes[step]);
    }
    if (step < kFilesAhead) {
      continue;
    }
    const std::size_t number = step - kFilesAhead;
    const auto part = content.first(static_cast<std::size_t>(sizes[number]));
    struct stat status;
    const bool is_read = file && fstat(file.number(), &status) == 0 && read_whole(file, part, starts[number]);
    stamps[number] = is_read ? stamp_of(status) : kNone;
    content = content.subspan(part.size());
    poll(static_cast<std::int64_t>(number) + 1);
  }
}

FileError write_files(Names paths, std::span<const std::span<const std::byte>> parts,
                      std::span<const std::int64_t> counts, Poll& poll) {
  const std::vector<const char*> starts = starts_of(paths, counts.size());
  for (std::size_t file = 0; file < counts.size(); ++file) {
    const auto count = static_cast<std::size_t>(counts[file]);
    if (const int error = write_file(starts[file], parts.first(count), poll); error != 0) {
      return {.number = error, .file = file};
    }
    parts = parts.subspan(count);
  }
  return {.number = 0, .file = 0};
}

void file_stamps(const char* folder, Names names, std::span<FileStamp> stamps, std::span<std::int64_t> changes,
                 int num_threads, Poll& poll) {
  const std::vector<const char*> starts = starts_of(names, stamps.size());
  const Descriptor opened = open_folder(folder);  // if it cannot be opened, only absolute names are found
  const auto count = static_cast<std::int64_t>(stamps.size());
  run_parallel((count + kFilesPerTask - 1) / kFilesPerTask, num_threads, poll, kFilesPerTask, [&](std::int64_t task) {
    for (std::int64_t file = task * kFilesPerTask; file < std::min(count, (task + 1) * kFilesPerTask); ++file) {
      const auto number = static_cast<std::size_t>(file);
      stamps[number] = look_at(opened.number(), starts[number], changes.empty() ? nullptr : &changes[number]);
    }
  });
}

}  // namespace trackbed
