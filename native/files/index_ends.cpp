#include "index_ends.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "system.hpp"
#include "trackbed/parallel.hpp"

namespace trackbed::files {
namespace {

constexpr std::size_t kCountsAt = 18;  // offset in the header of the 8-byte counts of sequences and document borders
constexpr std::uint64_t kLengthBytes = 4;
constexpr std::uint64_t kSequenceBytes = 12;  // a length and a pointer
constexpr std::uint64_t kBorderBytes = 8;

// True if the number that ends at offset `end` was read, from the head if that holds it.
template <class Number>
bool read_before(std::uint64_t end, const Descriptor& file, std::span<const std::byte> head, std::int64_t& found) {
  const std::uint64_t start = end - sizeof(Number);
  Number number = 0;
  if (end <= head.size()) {
    std::memcpy(&number, head.data() + start, sizeof(Number));
  } else if (!read_whole(file, std::as_writable_bytes(std::span(&number, 1)), static_cast<std::int64_t>(start))) {
    return false;
  }
  found = number;
  return true;
}

// True if the last length, pointer and border were read, as far as there are any.
bool read_numbers(IndexEnds& ends, const Descriptor& file, std::span<const std::byte> head) {
  std::uint64_t counts[2];
  std::memcpy(counts, head.data() + kCountsAt, sizeof(counts));
  const auto size = static_cast<std::uint64_t>(ends.stamp.size_bytes);
  if (counts[0] > size / kSequenceBytes || counts[1] > size / kBorderBytes) {
    return true;  // below, no sum exceeds 64 bits
  }
  const std::uint64_t pointers_at = kIndexHeaderBytes + kLengthBytes * counts[0];
  const std::uint64_t borders_at = kIndexHeaderBytes + kSequenceBytes * counts[0];
  const std::uint64_t stop = borders_at + kBorderBytes * counts[1];
  if (stop > size) {
    return true;
  }
  const bool has_lengths = counts[0] == 0 || (read_before<std::int32_t>(pointers_at, file, head, ends.last_length) &&
                                              read_before<std::int64_t>(borders_at, file, head, ends.last_pointer));
  return has_lengths && (counts[1] == 0 || read_before<std::int64_t>(stop, file, head, ends.last_border));
}

// True if everything was read; else errno is set.
bool read_open(const Descriptor& file, std::span<std::byte, kIndexEndsBytes> content, IndexEnds& ends) {
  struct stat status;
  if (fstat(file.number(), &status) != 0) {
    return false;
  }
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(status.st_size, 0));
  const std::span<std::byte> head = content.first(std::min(size, kIndexHeaderBytes + kIndexEndBytes));
  const std::span<std::byte> tail = content.subspan(head.size(), std::min(size, kIndexEndBytes));
  if (!read_whole(file, head, 0) || !read_whole(file, tail, status.st_size - static_cast<std::int64_t>(tail.size()))) {
    return false;
  }
  ends.stamp = stamp_of(status);
  ends.changed_ns = std::int64_t{status.st_ctim.tv_sec} * 1'000'000'000 + status.st_ctim.tv_nsec;
  ends.head_bytes = static_cast<std::int64_t>(head.size());
  ends.tail_bytes = static_cast<std::int64_t>(tail.size());
  return head.size() < kIndexHeaderBytes || read_numbers(ends, file, head);
}

}  // namespace

void read_index_ends(Names paths, std::span<std::byte> content, std::span<IndexEnds> ends, int num_threads,
                     Poll& poll) {
  const std::vector<const char*> starts = starts_of(paths, ends.size());
  run_parallel(static_cast<std::int64_t>(ends.size()), num_threads, poll, 1, [&](std::int64_t task) {
    const auto file = static_cast<std::size_t>(task);
    const auto own = content.subspan(file * kIndexEndsBytes).first<kIndexEndsBytes>();
    const Descriptor opened = open_to_read(starts[file]);
    ends[file] = IndexEnds{};
    if (!opened || !read_open(opened, own, ends[file])) {
      ends[file] = IndexEnds{.error = errno};
    }
  });
}

}  // namespace trackbed::files
