#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "trackbed/poll.hpp"
#include "trackbed/small_files.hpp"

namespace trackbed {

constexpr std::size_t kIndexHeaderBytes = 34;
constexpr std::size_t kIndexEndBytes = 4096;
// The header, what follows it, and the end of the file.
constexpr std::size_t kIndexEndsBytes = kIndexHeaderBytes + 2 * kIndexEndBytes;

// What is read of an `.idx` file to open it (docs/formats/indexed.md). Nothing in it is checked.
struct IndexEnds {
  std::int64_t error;  // the system's number, 0 where the file could be read
  FileStamp stamp;     // -1 thrice where it could not
  std::int64_t head_bytes;
  std::int64_t tail_bytes;
  // 0 where there is none, or the header's counts go beyond the file.
  std::int64_t last_length;
  std::int64_t last_pointer;
  std::int64_t last_border;
};

// Reads of each file the header with 4 KiB, and its last 4 KiB: into kIndexEndsBytes of `content` each, one after the
// other. Eight calls of the system a file at most. A call that a signal interrupts is not made again: that is an error
// like others, so that Python may look at the signal.
// Requires: as many paths as ends, and `content` of kIndexEndsBytes for each.
void read_index_ends(Names paths, std::span<std::byte> content, std::span<IndexEnds> ends, int num_threads, Poll& poll);

}  // namespace trackbed
