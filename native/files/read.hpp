#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "system.hpp"
#include "trackbed/poll.hpp"

namespace trackbed::files {

// Examines as many files as there are stamps, by one system call each.
// Requires: as many paths as stamps.
void read_stamps(Names paths, std::span<FileStamp> stamps, int num_threads, Poll& poll);

// Reads sizes[file] bytes from offset starts[file] of each file, into consecutive parts of `content`, and examines it.
// The stamp of a file that cannot be read, or ends before its part does, is `kNoFile`.
// Requires: as many paths, starts and sizes as stamps; `content` is as long as the sum of the sizes. Five system calls
// a file, and up to 17 files open: the next ones are read from the disk meanwhile.
void read_parts(Names paths, std::span<const std::int64_t> starts, std::span<const std::int64_t> sizes,
                std::span<std::byte> content, std::span<FileStamp> stamps, Poll& poll);

}  // namespace trackbed::files
