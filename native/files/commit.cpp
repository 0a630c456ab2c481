#include "commit.hpp"

#include <fcntl.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <deque>
#include <string>
#include <system_error>
#include <vector>

namespace trackbed::files {
namespace {

// Ends the commit of a set, unless `error`, an errno, is 0.
void check(int error) {
  if (error != 0) {
    throw std::system_error(error, std::generic_category());
  }
}

// True for the errno of a file system without unnamed files.
bool lacks_unnamed_files(int error) {
  return error == EOPNOTSUPP || error == EISDIR || error == EINVAL || error == ENOENT;
}

// True for the errno of a file system without hard links.
bool lacks_links(int error) {
  return error == EPERM || error == EOPNOTSUPP || error == ENOSYS || error == EMLINK || error == EINVAL;
}

// Names an unnamed file unless the name is taken. Returns 0 or the errno.
int name_file(const Descriptor& file, const char* path) {
  if (linkat(file.number(), "", AT_FDCWD, path, AT_EMPTY_PATH) == 0) {
    return 0;
  }
  if (errno != ENOENT) {
    return errno;
  }
  const std::string opened = "/proc/self/fd/" + std::to_string(file.number());  // for older systems
  return linkat(AT_FDCWD, opened.c_str(), AT_FDCWD, path, AT_SYMLINK_FOLLOW) == 0 ? 0 : errno;
}

// Renames a file unless the name is taken. Returns 0 or the errno.
int rename_unless_taken(const char* from, const char* path) {
#if defined(SYS_renameat2) && defined(RENAME_NOREPLACE)
  if (syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, path, RENAME_NOREPLACE) == 0) {
    return 0;
  }
  if (errno != EINVAL && errno != ENOSYS) {  // most network file systems do not support it
    return errno;
  }
#endif
  if (linkat(AT_FDCWD, from, AT_FDCWD, path, 0) == 0) {
    return unlink(from) == 0 ? 0 : errno;
  }
  if (!lacks_links(errno)) {
    return errno;
  }
  if (faccessat(AT_FDCWD, path, F_OK, AT_SYMLINK_NOFOLLOW) == 0) {
    return EEXIST;
  }
  return rename(from, path) == 0 ? 0 : errno;
}

// One file of a set, until it appears.
class NewFile {
 public:
  // Requires: `parts` is empty if the file is complete at its partial path.
  NewFile(const char* path, const char* partial, Parts parts, bool is_complete)
      : path_(path), partial_(partial), parts_(parts), has_partial_(is_complete), is_own_(!is_complete) {}
  NewFile(NewFile&&) = delete;
  ~NewFile() {
    if (has_partial_ && is_own_) {
      unlink(partial_);
    }
  }

  // Writes the file, unless it is complete; clears `may_be_unnamed` if the file system has no unnamed files.
  FileStamp complete(bool& may_be_unnamed, Poll& poll) {
    if (is_own_) {
      write(may_be_unnamed, poll);
    }
    struct stat status;
    check((has_partial_ ? stat(partial_, &status) : fstat(opened_.number(), &status)) == 0 ? 0 : errno);
    return stamp_of(status);
  }

  // Lets the file appear unless the name is taken.
  void claim() {
    check(has_partial_ ? rename_unless_taken(partial_, path_) : name_file(opened_, path_));
    has_partial_ = false;
  }

  // Lets the file appear in place of what is there.
  void replace() {
    if (!has_partial_) {
      const int error = name_file(opened_, path_);
      if (error == 0) {
        return;
      }
      check(error == EEXIST ? name_file(opened_, partial_) : error);
      has_partial_ = true;
    }
    check(rename(partial_, path_) == 0 ? 0 : errno);
    has_partial_ = false;
  }

  // Size of the file that has the name; -1 if none has.
  std::int64_t old_size() const {
    struct stat status;
    return stat(path_, &status) == 0 ? std::int64_t{status.st_size} : -1;
  }

 private:
  void write(bool& may_be_unnamed, Poll& poll) {
    if (may_be_unnamed) {
      const std::string folder(path_, std::string_view(path_).rfind('/') + 1);
      opened_ = Descriptor(open(folder.empty() ? "." : folder.c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, 0666));
      may_be_unnamed = opened_ || !lacks_unnamed_files(errno);
    }
    if (!may_be_unnamed) {
      opened_ = Descriptor(open(partial_, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
      has_partial_ = static_cast<bool>(opened_);
    }
    check(opened_ ? 0 : errno);
    check(write_parts(opened_, parts_, poll));
    if (has_partial_) {
      opened_ = Descriptor();  // some file systems write, and set times, when a file is closed
    }
  }

  const char* path_;
  const char* partial_;
  Parts parts_;
  Descriptor opened_;  // of a file without a name
  bool has_partial_;   // it lies at its partial path
  bool is_own_;        // it is written here, and goes if it does not appear
};

// Lets the complete files of a set appear.
void appear(std::deque<NewFile>& files, Claim claim, std::span<const FileStamp> stamps) {
  if (claim == Claim::kTake) {
    files.back().claim();
  } else if (claim == Claim::kReplace) {
    files.back().replace();
  }
  std::vector<NewFile*> fitting;
  std::vector<NewFile*> others;
  for (std::size_t file = 0; file < files.size() - 1; ++file) {
    (files[file].old_size() == stamps[file].size_bytes ? fitting : others).push_back(&files[file]);
  }
  check(claim == Claim::kNone && others.empty() ? EALREADY : 0);
  fitting.insert(fitting.end(), others.begin(), others.end());
  for (NewFile* file : fitting) {
    file->replace();
  }
}

}  // namespace

void commit_file_sets(const FileSets& sets, std::span<FileStamp> stamps, std::span<std::int32_t> errors, Poll& poll) {
  const std::vector<const char*> paths = starts_of(sets.paths, stamps.size());
  const std::vector<const char*> partials = starts_of(sets.partials, stamps.size());
  bool may_be_unnamed = sets.may_be_unnamed;
  Parts parts = sets.parts;
  std::size_t first = 0;
  for (std::size_t set = 0; set < errors.size(); ++set) {
    const auto count = static_cast<std::size_t>(sets.num_files[set]);
    const auto claim = static_cast<Claim>(sets.claims[set]);
    std::deque<NewFile> files;  // what did not appear goes at its end, and when the poll throws
    for (std::size_t file = first; file < first + count; ++file) {
      const auto num_parts = static_cast<std::size_t>(std::max<std::int64_t>(sets.num_parts[file], 0));
      files.emplace_back(paths[file], partials[file], parts.first(num_parts), sets.num_parts[file] < 0);
      parts = parts.subspan(num_parts);
    }
    errors[set] = 0;
    try {
      for (std::size_t file = 0; file < (claim == Claim::kNone ? count - 1 : count); ++file) {
        stamps[first + file] = files[file].complete(may_be_unnamed, poll);
      }
      appear(files, claim, stamps.subspan(first, count));
    } catch (const std::system_error& error) {
      errors[set] = error.code().value();
    }
    first += count;
    poll(static_cast<std::int64_t>(set) + 1);
  }
}

}  // namespace trackbed::files
