#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "trackbed/poll.hpp"

namespace trackbed {

// Concatenated names of files, each followed by a zero byte.
using Names = std::span<const char>;

// Identity of a file, which tells it from another file of the same name and from itself after a change. All -1 if there
// is no file.
struct FileStamp {
  std::int64_t inode;
  std::int64_t size_bytes;
  std::int64_t modified_ns;  // since 1970
};

// Error of a system call, and the file it concerns.
struct FileError {
  int number;  // errno, or 0
  std::size_t file;
};

// Writes new files, each of counts[file] consecutive parts. Stops at the first error; files written before it stay.
// Requires: as many paths as counts, and as many parts as the sum of the counts.
FileError write_files(Names paths, std::span<const std::span<const std::byte>> parts,
                      std::span<const std::int64_t> counts, Poll& poll);

// Reads sizes[file] bytes from starts[file] on of each file, consecutively into `content`, and the stamp of the file.
// The stamp of a file that cannot be read, or that is too short, is all -1.
// Requires: as many paths, starts and sizes as stamps, and `content` of the sum of the sizes. Five system calls per
// file; up to 17 files are open, so that the next ones are read ahead from the disk.
void read_parts(Names paths, std::span<const std::int64_t> starts, std::span<const std::int64_t> sizes,
                std::span<std::byte> content, std::span<FileStamp> stamps, Poll& poll);

// Reads the stamp of each file and, unless `changes` is empty, its change time (ctime) in nanoseconds since 1970.
// Requires: as many names as stamps, absolute or relative to `folder`, and as many changes or none. One system call per
// file, and one for the folder.
void file_stamps(const char* folder, Names names, std::span<FileStamp> stamps, std::span<std::int64_t> changes,
                 int num_threads, Poll& poll);

}  // namespace trackbed
