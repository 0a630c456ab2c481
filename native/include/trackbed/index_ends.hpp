#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "trackbed/poll.hpp"
#include "trackbed/small_files.hpp"

namespace trackbed {

constexpr std::size_t kIndexHeaderBytes = 34;
constexpr std::size_t kIndexEndBytes = 4096;
// Header, following bytes, and end of the file.
constexpr std::size_t kIndexEndsBytes = kIndexHeaderBytes + 2 * kIndexEndBytes;

// Unchecked contents of both ends of an `.idx` file (docs/formats/indexed.md).
struct IndexEnds {
  std::int64_t error;  // errno, or 0 if the file was read
  FileStamp stamp;     // all -1 if it was not
  std::int64_t head_bytes;
  std::int64_t tail_bytes;
  // 0 if there is none, or if the header's counts exceed the file.
  std::int64_t last_length;
  std::int64_t last_pointer;
  std::int64_t last_border;
};

// Reads the header, the 4 KiB after it, and the last 4 KiB of each file into consecutive kIndexEndsBytes of `content`.
// At most eight system calls per file. A system call that is interrupted by a signal is not retried but reported as an
// error, so that Python can handle the signal.
// Requires: as many paths as ends, and `content` of kIndexEndsBytes for each.
void read_index_ends(Names paths, std::span<std::byte> content, std::span<IndexEnds> ends, int num_threads, Poll& poll);

}  // namespace trackbed
