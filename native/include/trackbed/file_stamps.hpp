#pragma once

#include <cstdint>
#include <span>

#include "trackbed/poll.hpp"

namespace trackbed {

// What tells a file from another that takes its name, and from itself after a change; -1 thrice where there is none.
struct FileStamp {
  std::int64_t inode;
  std::int64_t size_bytes;
  std::int64_t modified_ns;  // since 1970
};

// Looks at as many files as there are stamps.
// `names` holds their names one after the other, each ended by a zero byte: below `folder`, or absolute.
// Requires: as many names as stamps. One call of the system a file, and one for the folder.
void file_stamps(const char* folder, std::span<const char> names, std::span<FileStamp> stamps, int num_threads,
                 Poll& poll);

}  // namespace trackbed
