#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "system.hpp"
#include "trackbed/poll.hpp"

namespace trackbed::files {

constexpr std::size_t kIndexHeaderBytes = 34;
constexpr std::size_t kIndexEndBytes = 4096;
// Header, what follows it, and the end of the file.
constexpr std::size_t kIndexEndsBytes = kIndexHeaderBytes + 2 * kIndexEndBytes;

// Parts of an `.idx` file that are read to open it (docs/formats/indexed.md), unchecked.
struct IndexEnds {
  std::int64_t error = 0;        // errno, or 0
  FileStamp stamp = kNoFile;     // `kNoFile` if it cannot be read
  std::int64_t changed_ns = -1;  // last change of any kind since 1970, which cannot be set
  std::int64_t head_bytes = 0;
  std::int64_t tail_bytes = 0;
  // 0 where there is none, or the counts in the header exceed the file.
  std::int64_t last_length = 0;
  std::int64_t last_pointer = 0;
  std::int64_t last_border = 0;
};

// Reads the header with the next 4 KiB, and the last 4 KiB, of each file into kIndexEndsBytes of `content`.
// A call that a signal interrupts is not repeated but is an error like others, so that Python can handle the signal.
// Requires: as many paths as ends, and `content` of kIndexEndsBytes for each. At most eight system calls a file.
void read_index_ends(Names paths, std::span<std::byte> content, std::span<IndexEnds> ends, int num_threads, Poll& poll);

}  // namespace trackbed::files
