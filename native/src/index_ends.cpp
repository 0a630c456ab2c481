#include "trackbed/index_ends.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "trackbed/descriptor.hpp"
#include "trackbed/parallel.hpp"

namespace trackbed {
namespace {

constexpr std::int64_t kFilesPerTask = 16;
constexpr std::size_t kCountsAt = 18;  // of the header: sequences, then document borders, of 8 bytes each
constexpr IndexEnds kUnread{.error = 0,
                            .stamp = {.inode = -1, .size_bytes = -1, .modified_ns = -1},
                            .head_bytes = 0,
                            .tail_bytes = 0,
                            .last_length = 0,
                            .last_pointer = 0,
                            .last_border = 0};

// How many bytes were read, less than wanted where the file ends before; or -1, with the error in errno.
std::int64_t read_at(const Descriptor& file, std::span<std::byte> wanted, std::int64_t start) {
  std::size_t done = 0;
  while (done < wanted.size()) {
    const ssize_t found =
        pread(file.number(), wanted.data() + done, wanted.size() - done, start + static_cast<std::int64_t>(done));
    if (found < 0 && errno != EINTR) {
      return -1;
    }
    if (found == 0) {
      break;
    }
    done += static_cast<std::size_t>(std::max<ssize_t>(found, 0));
  }
  return static_cast<std::int64_t>(done);
}

// A number of the file that ends before `end`, taken from the file's head where that holds it; 0 where none is.
template <class Number>
std::int64_t number_before(std::int64_t end, const Descriptor& file, std::span<const std::byte> head) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(Number));
  Number number = 0;
  if (end <= static_cast<std::int64_t>(head.size())) {
    std::memcpy(&number, head.data() + end - kBytes, sizeof(Number));
    return number;
  }
  const std::int64_t found = read_at(file, std::as_writable_bytes(std::span(&number, 1)), end - kBytes);
  return found == kBytes ? number : 0;
}

void read_numbers(IndexEnds& ends, const Descriptor& file, std::span<const std::byte> head) {
  std::uint64_t counts[2];
  std::memcpy(counts, head.data() + kCountsAt, sizeof(counts));
  const auto size = static_cast<std::uint64_t>(ends.stamp.size_bytes);
  if (counts[0] > size || counts[1] > size) {
    return;
  }
  const auto sequences = static_cast<std::int64_t>(counts[0]);
  const std::int64_t pointers_at = static_cast<std::int64_t>(kIndexHeaderBytes) + 4 * sequences;
  const std::int64_t borders_at = pointers_at + 8 * sequences;
  const std::int64_t stop = borders_at + 8 * static_cast<std::int64_t>(counts[1]);
  if (stop > ends.stamp.size_bytes) {
    return;
  }
  if (sequences > 0) {
    ends.last_length = number_before<std::int32_t>(pointers_at, file, head);
    ends.last_pointer = number_before<std::int64_t>(borders_at, file, head);
  }
  if (counts[1] > 0) {
    ends.last_border = number_before<std::int64_t>(stop, file, head);
  }
}

IndexEnds read_one(const char* path, std::span<std::byte, kIndexEndsBytes> content) {
  IndexEnds ends = kUnread;
  const Descriptor file(open(path, O_RDONLY | O_CLOEXEC));
  struct stat status;
  if (!file || fstat(file.number(), &status) != 0) {
    ends.error = errno;
    return ends;
  }
  const std::int64_t head = read_at(file, content.first(kIndexHeaderBytes + kIndexEndBytes), 0);
  const std::int64_t tail_at = std::max<std::int64_t>(0, status.st_size - static_cast<std::int64_t>(kIndexEndBytes));
  const std::int64_t tail =
      head < 0 ? -1 : read_at(file, content.subspan(static_cast<std::size_t>(head), kIndexEndBytes), tail_at);
  if (tail < 0) {
    ends.error = errno;
    return ends;
  }
  ends.stamp = stamp_of(status);
  ends.head_bytes = head;
  ends.tail_bytes = tail;
  if (head >= static_cast<std::int64_t>(kIndexHeaderBytes)) {
    read_numbers(ends, file, content.first(static_cast<std::size_t>(head)));
  }
  return ends;
}

}  // namespace

void read_index_ends(Names paths, std::span<std::byte> content, std::span<IndexEnds> ends, int num_threads,
                     Poll& poll) {
  const std::vector<const char*> starts = starts_of(paths, ends.size());
  const auto count = static_cast<std::int64_t>(ends.size());
  run_parallel((count + kFilesPerTask - 1) / kFilesPerTask, num_threads, poll, kFilesPerTask, [&](std::int64_t task) {
    const std::int64_t stop = std::min(count, (task + 1) * kFilesPerTask);
    for (auto file = static_cast<std::size_t>(task * kFilesPerTask); file < static_cast<std::size_t>(stop); ++file) {
      const auto place = content.subspan(file * kIndexEndsBytes).first<kIndexEndsBytes>();
      ends[file] = read_one(starts[file], place);
    }
  });
}

}  // namespace trackbed
