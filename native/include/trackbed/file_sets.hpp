#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "trackbed/poll.hpp"
#include "trackbed/small_files.hpp"

namespace trackbed {

// Where sets of files, as many of each, are to appear: file f of set s under the name stems[s] + endings[f], the
// last one of each set in a folder of its own.
struct FileSetNames {
  const char* files;   // a folder that is there, as are the others
  const char* claims;  // where the last one of each set appears
  Names stems;
  Names endings;
  // Where files are that are not complete, under their names and this ending; unless they `may_be_unnamed`, and the
  // file system has files without a name, of which nothing is left when a process is killed.
  const char* partials;
  const char* partial_ending;
  bool may_be_unnamed;
};

// Makes new files of `counts[s * F + f]` parts each, F a set, and lets each set appear when its files are complete:
// the last file first, as a claim, then the others. Of what appeared, `stamps` says which files it is, and `errors` is
// 0. A set of which some name is taken has EEXIST, and like one that cannot be written, which has another number of the
// system's, leaves nothing behind. Where the system fails after the claim, that stays, with what appeared until then.
// Requires: F at least 1, as many stamps as counts, as many errors as stems, counts of at least 0 and as many parts as
// they say together. About five calls of the system a file.
void publish_file_sets(const FileSetNames& names, std::span<const std::span<const std::byte>> parts,
                       std::span<const std::int64_t> counts, std::span<FileStamp> stamps,
                       std::span<std::int32_t> errors, Poll& poll);

}  // namespace trackbed
