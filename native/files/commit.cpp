#include "commit.hpp"

#include <fcntl.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <deque>
#include <string>
#include <vector>

namespace trackbed::files {
namespace {

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
  NewFile(const char* path, const char* partial) : path_(path), partial_(partial) {}
  NewFile(NewFile&&) = delete;
  ~NewFile() {
    if (has_partial_ && is_own_) {
      unlink(partial_);
    }
  }

  // Takes the file that is complete at the partial path. Returns 0 or the errno.
  int adopt(FileStamp& stamp) {
    has_partial_ = true;
    is_own_ = false;
    return examine(stamp);
  }

  // Writes the file; clears `may_be_unnamed` if the file system has no unnamed files. Returns 0 or the errno.
  int write(std::span<const std::span<const std::byte>> parts, bool& may_be_unnamed, Poll& poll, FileStamp& stamp) {
    if (may_be_unnamed) {
      const std::string folder(path_, std::string_view(path_).rfind('/') + 1);
      opened_ = Descriptor(open(folder.empty() ? "." : folder.c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, 0666));
      may_be_unnamed = opened_ || !lacks_unnamed_files(errno);
    }
    if (!may_be_unnamed) {
      opened_ = Descriptor(open(partial_, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
      has_partial_ = static_cast<bool>(opened_);
    }
    if (!opened_) {
      return errno;
    }
    if (const int error = write_parts(opened_, parts, poll); error != 0) {
      return error;
    }
    if (has_partial_) {
      opened_ = Descriptor();  // some file systems write, and set times, when a file is closed
    }
    return examine(stamp);
  }

  // Lets the file appear unless the name is taken. Returns 0 or the errno.
  int claim() {
    const int error = has_partial_ ? rename_unless_taken(partial_, path_) : name_file(opened_, path_);
    has_partial_ = has_partial_ && error != 0;
    return error;
  }

  // Lets the file appear in place of what is there. Returns 0 or the errno.
  int replace() {
    if (!has_partial_) {
      if (const int error = name_file(opened_, path_); error != EEXIST) {
        return error;
      }
      if (const int error = name_file(opened_, partial_); error != 0) {
        return error;
      }
      has_partial_ = true;
    }
    if (rename(partial_, path_) != 0) {
      return errno;
    }
    has_partial_ = false;
    return 0;
  }

  // Size of the file that has the name; -1 if none has.
  std::int64_t old_size() const {
    struct stat status;
    return stat(path_, &status) == 0 ? std::int64_t{status.st_size} : -1;
  }

 private:
  int examine(FileStamp& stamp) const {
    struct stat status;
    if ((has_partial_ ? stat(partial_, &status) : fstat(opened_.number(), &status)) != 0) {
      return errno;
    }
    stamp = stamp_of(status);
    return 0;
  }

  const char* path_;
  const char* partial_;
  Descriptor opened_;         // of a file without a name
  bool has_partial_ = false;  // it lies at its partial path
  bool is_own_ = true;        // it was written here, and goes if it does not appear
};

// Lets the complete files of a set appear. Returns 0 or the errno.
int appear(std::deque<NewFile>& files, Claim claim, std::span<const FileStamp> stamps) {
  if (claim != Claim::kNone) {
    if (const int error = claim == Claim::kTake ? files.back().claim() : files.back().replace(); error != 0) {
      return error;
    }
  }
  std::vector<NewFile*> fitting;
  std::vector<NewFile*> others;
  for (std::size_t file = 0; file < files.size() - 1; ++file) {
    (files[file].old_size() == stamps[file].size_bytes ? fitting : others).push_back(&files[file]);
  }
  if (claim == Claim::kNone && others.empty()) {
    return EALREADY;
  }
  fitting.insert(fitting.end(), others.begin(), others.end());
  for (NewFile* file : fitting) {
    if (const int error = file->replace(); error != 0) {
      return error;
    }
  }
  return 0;
}

}  // namespace

void commit_file_sets(const FileSets& sets, std::span<FileStamp> stamps, std::span<std::int32_t> errors, Poll& poll) {
  const std::vector<const char*> paths = starts_of(sets.paths, stamps.size());
  const std::vector<const char*> partials = starts_of(sets.partials, stamps.size());
  bool may_be_unnamed = sets.may_be_unnamed;
  std::span<const std::span<const std::byte>> parts = sets.parts;
  std::size_t first = 0;
  for (std::size_t set = 0; set < errors.size(); ++set) {
    const auto count = static_cast<std::size_t>(sets.num_files[set]);
    const auto claim = static_cast<Claim>(sets.claims[set]);
    std::deque<NewFile> files;  // what did not appear goes at its end, and when the poll throws
    int error = 0;
    for (std::size_t file = first; file < first + count; ++file) {
      files.emplace_back(paths[file], partials[file]);
      const std::int64_t num_parts = sets.num_parts[file];
      const auto own = parts.first(static_cast<std::size_t>(std::max<std::int64_t>(num_parts, 0)));
      parts = parts.subspan(own.size());
      if (error == 0 && !(claim == Claim::kNone && file == first + count - 1)) {
        error = num_parts < 0 ? files.back().adopt(stamps[file])
                              : files.back().write(own, may_be_unnamed, poll, stamps[file]);
      }
    }
    errors[set] = error == 0 ? appear(files, claim, stamps.subspan(first, count)) : error;
    first += count;
    poll(static_cast<std::int64_t>(set) + 1);
  }
}

}  // namespace trackbed::files
