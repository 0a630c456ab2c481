#include "trackbed/file_stamps.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "trackbed/parallel.hpp"

namespace trackbed {
namespace {

constexpr std::int64_t kFilesPerTask = 256;

struct Folder {
  int descriptor;  // -1 is none: then only absolute names are found

  explicit Folder(const char* path) : descriptor(open(path, O_PATH | O_DIRECTORY | O_CLOEXEC)) {}
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    if (descriptor >= 0) {
      close(descriptor);
    }
  }
};

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

void file_stamps(const char* folder, std::span<const char> names, std::span<FileStamp> stamps, int num_threads,
                 Poll& poll) {
  std::vector<const char*> starts;
  starts.reserve(stamps.size());
  for (const char* name = names.data(); starts.size() < stamps.size(); name += std::strlen(name) + 1) {
    starts.push_back(name);
  }
  const Folder opened(folder);
  const auto count = static_cast<std::int64_t>(stamps.size());
  run_parallel((count + kFilesPerTask - 1) / kFilesPerTask, num_threads, poll, kFilesPerTask, [&](std::int64_t task) {
    for (std::int64_t file = task * kFilesPerTask; file < std::min(count, (task + 1) * kFilesPerTask); ++file) {
      stamps[static_cast<std::size_t>(file)] = stamp_of(opened.descriptor, starts[static_cast<std::size_t>(file)]);
    }
  });
}

}  // namespace trackbed
