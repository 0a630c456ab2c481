#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "system.hpp"
#include "trackbed/poll.hpp"

namespace trackbed::files {

// How the last file of a set, which claims the name of the set, appears.
enum class Claim : std::uint8_t {
  kTake,     // first, unless there is a file of that name: then the set does not appear
  kReplace,  // first, in place of any file of that name
  kNone,     // not at all: it is not written, as the name belongs to the set already
};

// Sets of files, one after the other.
struct FileSets {
  Names paths;     // final path of each file; the last one of a set is its claim
  Names partials;  // path of each file until it appears
  // Number of parts of each file; -1 for a file that is complete at its partial path.
  std::span<const std::int64_t> num_parts;
  Parts parts;
  std::span<const std::int64_t> num_files;  // of each set, at least 1
  std::span<const std::uint8_t> claims;     // a `Claim` for each set
  // Files have no name until they appear, where the file system supports that: nothing is left if the process is
  // killed.
  bool may_be_unnamed;
};

// Writes the files of each set and lets them appear once all of them are complete: the claim first, then the files
// whose old size fits, then the others, so that all sizes fit only when every file is the new one.
//
// `stamps` identifies the files that appeared. `errors` is 0 for a set that appeared, and EEXIST if its claim is taken;
// then, and after any other errno before the claim appeared, nothing of the set is left but partial files that were
// complete before. Where the system fails after that, the claim stays, with the files that appeared until then.
// With `Claim::kNone`, a set all of whose files have the right size already is left as it is: EALREADY.
// Requires: as many paths, partials and stamps as files, and as many claims and errors as sets. About five system calls
// a file.
void commit_file_sets(const FileSets& sets, std::span<FileStamp> stamps, std::span<std::int32_t> errors, Poll& poll);

}  // namespace trackbed::files
