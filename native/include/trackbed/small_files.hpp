#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "trackbed/poll.hpp"

namespace trackbed {

// Names of files, one after the other, each ended by a zero byte.
using Names = std::span<const char>;

// What tells a file from another that takes its name, and from itself after a change; -1 thrice where there is none.
struct FileStamp {
  std::int64_t inode;
  std::int64_t size_bytes;
  std::int64_t modified_ns;  // since 1970
};

// What the system said, and of which file.
struct FileError {
  int number;  // 0 where all went well
  std::size_t file;
};

// Makes one new file of each part list: `counts[file]` parts, one after the other. Stops at the first error; the files
// that were made stay.
// Requires: as many paths as counts, and as many parts as the counts say together.
FileError write_files(Names paths, std::span<const std::span<const std::byte>> parts,
                      std::span<const std::int64_t> counts, Poll& poll);

// Reads sizes[file] bytes from starts[file] on of each file, one part after the other into `content`, and looks at it.
// The stamp of one that cannot be read, or ends before its part does, is -1 thrice.
// Requires: as many paths, starts and sizes as stamps, and `content` as long as all sizes together. Five calls of the
// system a file, and up to 17 files open: what the next ones hold is read from the disk meanwhile.
void read_parts(Names paths, std::span<const std::int64_t> starts, std::span<const std::int64_t> sizes,
                std::span<std::byte> content, std::span<FileStamp> stamps, Poll& poll);

// Looks at as many files as there are stamps.
// Requires: as many names as stamps, below `folder` or absolute, and as many changes or none: the time at which each
// file last changed in any way, in nanoseconds since 1970. One call of the system a file, and one for the folder.
void file_stamps(const char* folder, Names names, std::span<FileStamp> stamps, std::span<std::int64_t> changes,
                 int num_threads, Poll& poll);

}  // namespace trackbed
