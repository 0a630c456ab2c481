#include "trackbed/file_sets.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <string>
#include <vector>

#include "trackbed/descriptor.hpp"

namespace trackbed {
namespace {

// True for errors of file systems that do not support unnamed files.
bool lacks_unnamed_files(int error) {
  return error == EOPNOTSUPP || error == EISDIR || error == EINVAL || error == ENOENT;
}

// Names an unnamed file. Returns the errno, EEXIST if the name exists, or 0.
int name_file(const Descriptor& file, const Descriptor& folder, const std::string& name) {
  if (linkat(file.number(), "", folder.number(), name.c_str(), AT_EMPTY_PATH) == 0) {
    return 0;
  }
  if (errno != ENOENT) {
    return errno;
  }
  const std::string path = "/proc/self/fd/" + std::to_string(file.number());  // for older kernels
  return linkat(AT_FDCWD, path.c_str(), folder.number(), name.c_str(), AT_SYMLINK_FOLLOW) == 0 ? 0 : errno;
}

int rename_file(const Descriptor& from, const std::string& name, const Descriptor& to, const std::string& final_name) {
  return renameat(from.number(), name.c_str(), to.number(), final_name.c_str()) == 0 ? 0 : errno;
}

// Renames a file without replacing another. Returns the errno, EEXIST if the name exists, or 0.
int claim_name(const Descriptor& from, const std::string& name, const Descriptor& to, const std::string& final_name) {
#if defined(SYS_renameat2) && defined(RENAME_NOREPLACE)
  if (syscall(SYS_renameat2, from.number(), name.c_str(), to.number(), final_name.c_str(), RENAME_NOREPLACE) == 0) {
    return 0;
  }
  if (errno != EINVAL && errno != ENOSYS) {  // not supported, mostly by network file systems
    return errno;
  }
#endif
  if (linkat(from.number(), name.c_str(), to.number(), final_name.c_str(), 0) != 0) {
    return errno;
  }
  return unlinkat(from.number(), name.c_str(), 0) == 0 ? 0 : errno;
}

// Writer of one set of files at a time.
class FileSet {
 public:
  explicit FileSet(const FileSetNames& names)
      : names_(names),
        is_unnamed_(names.may_be_unnamed),
        files_(open_folder(names.files)),
        claims_(open_folder(names.claims)),
        partials_(open_folder(names.partials)) {}

  ~FileSet() { clear(); }

  bool has_folders() const { return files_ && claims_ && partials_; }

  // Starts the next set.
  void take(const char* stem, std::span<const char* const> endings) {
    clear();
    for (const char* ending : endings) {
      made_.push_back({.name = std::string(stem) + ending, .opened = Descriptor(), .has_partial = false});
    }
  }

  // Writes one file of the set. Returns the errno, or 0.
  int write(std::size_t file, std::span<const std::span<const std::byte>> parts, Poll& poll, FileStamp& stamp) {
    Made& made = made_[file];
    if (is_unnamed_) {
      made.opened = Descriptor(openat(folder_of(file).number(), ".", O_WRONLY | O_TMPFILE | O_CLOEXEC, 0666));
      is_unnamed_ = made.opened || !lacks_unnamed_files(errno);
    }
    if (!is_unnamed_) {
      const int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
      made.opened = Descriptor(openat(partials_.number(), partial_name(made).c_str(), flags, 0666));
      made.has_partial = static_cast<bool>(made.opened);
    }
    if (!made.opened) {
      return errno;
    }
    if (const int error = write_parts(made.opened, parts, poll); error != 0) {
      return error;
    }
    struct stat status;
    if (made.has_partial) {
      made.opened = Descriptor();  // some file systems write the file, and set its times, when it is closed
    }
    const int failed = made.has_partial ? fstatat(partials_.number(), partial_name(made).c_str(), &status, 0)
                                        : fstat(made.opened.number(), &status);
    if (failed != 0) {
      return errno;
    }
    stamp = stamp_of(status);
    return 0;
  }

  // Publishes the set. Returns the errno, or 0.
  int appear() {
    const std::size_t last = made_.size() - 1;
    for (std::size_t file = 0; file < last; ++file) {
      if (faccessat(files_.number(), made_[file].name.c_str(), F_OK, 0) == 0) {
        return EEXIST;
      }
    }
    int error = claim(last);
    for (std::size_t file = 0; file < last && error == 0; ++file) {
      error = replace(file);  // a file that was created since the check above has no claim
    }
    return error;
  }

 private:
  struct Made {
    std::string name;
    Descriptor opened;
    bool has_partial;  // true if it has its partial name; else it is unnamed or published
  };

  const Descriptor& folder_of(std::size_t file) const { return file + 1 < made_.size() ? files_ : claims_; }

  std::string partial_name(const Made& made) const { return made.name + names_.partial_ending; }

  int claim(std::size_t file) {
    Made& made = made_[file];
    if (!made.has_partial) {
      const int error = name_file(made.opened, folder_of(file), made.name);
      is_unnamed_ = error == 0 || error == EEXIST;  // else naming is not supported: the next sets use partial names
      return error;
    }
    const int error = claim_name(partials_, partial_name(made), folder_of(file), made.name);
    made.has_partial = error != 0;
    return error;
  }

  int replace(std::size_t file) {
    Made& made = made_[file];
    int error = made.has_partial ? EEXIST : name_file(made.opened, folder_of(file), made.name);
    if (error == EEXIST && !made.has_partial) {
      error = name_file(made.opened, partials_, partial_name(made));
      made.has_partial = error == 0;
    }
    if (made.has_partial) {
      error = rename_file(partials_, partial_name(made), folder_of(file), made.name);
      made.has_partial = error != 0;
    }
    return error;
  }

  // Removes files that were not published.
  void clear() {
    for (const Made& made : made_) {
      if (made.has_partial) {
        unlinkat(partials_.number(), partial_name(made).c_str(), 0);
      }
    }
    made_.clear();
  }

  const FileSetNames& names_;
  bool is_unnamed_;
  Descriptor files_;
  Descriptor claims_;
  Descriptor partials_;
  std::vector<Made> made_;
};

}  // namespace

void publish_file_sets(const FileSetNames& names, std::span<const std::span<const std::byte>> parts,
                       std::span<const std::int64_t> counts, std::span<FileStamp> stamps,
                       std::span<std::int32_t> errors, Poll& poll) {
  const std::size_t files = errors.empty() ? 0 : counts.size() / errors.size();
  const std::vector<const char*> stems = starts_of(names.stems, errors.size());
  const std::vector<const char*> endings = starts_of(names.endings, files);
  FileSet set(names);  // its destructor removes unpublished files, also if the poll throws
  if (!set.has_folders()) {
    std::fill(errors.begin(), errors.end(), ENOENT);
    return;
  }
  for (std::size_t number = 0; number < errors.size(); ++number) {
    set.take(stems[number], endings);
    int error = 0;
    for (std::size_t file = number * files; file < (number + 1) * files; ++file) {
      const auto count = static_cast<std::size_t>(counts[file]);
      error = error == 0 ? set.write(file - number * files, parts.first(count), poll, stamps[file]) : error;
      parts = parts.subspan(count);
    }
    errors[number] = error == 0 ? set.appear() : error;
    poll(static_cast<std::int64_t>(number) + 1);
  }
}

}  // namespace trackbed
