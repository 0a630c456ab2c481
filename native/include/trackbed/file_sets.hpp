#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "trackbed/poll.hpp"
#include "trackbed/small_files.hpp"

namespace trackbed {

// Names of sets with equal numbers of files: file f of set s is named stems[s] + endings[f]. The last file of each set
// is in a separate folder.
struct FileSetNames {
  const char* files;   // an existing folder, like the others
  const char* claims;  // folder of the last file of each set
  Names stems;
  Names endings;
  // Folder of incomplete files, which have `partial_ending` added to their names. If `may_be_unnamed`, and the file
  // system supports unnamed files, these are used instead; nothing remains of them when a process is killed.
  const char* partials;
  const char* partial_ending;
  bool may_be_unnamed;
};

// Writes sets of F new files, where file f of set s has counts[s * F + f] parts. Publishes each set when its files are
// complete: the last file first, as a claim, then the others. For a published set, `errors` is 0 and `stamps` contains
// its files. A set with an existing name gets EEXIST, and one that cannot be written another errno; both leave nothing
// behind. If a system call fails after the claim, the claim stays, with the files published before the failure.
// Requires: F at least 1, as many stamps as counts, as many errors as stems, counts of at least 0, and as many parts as
// the sum of the counts. About five system calls per file.
void publish_file_sets(const FileSetNames& names, std::span<const std::span<const std::byte>> parts,
                       std::span<const std::int64_t> counts, std::span<FileStamp> stamps,
                       std::span<std::int32_t> errors, Poll& poll);

}  // namespace trackbed
