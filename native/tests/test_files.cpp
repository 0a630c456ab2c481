// File input and output against plain C++, with and without unnamed files.

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "commit.hpp"
#include "exchange.hpp"
#include "index_ends.hpp"
#include "read.hpp"

namespace {

namespace fs = std::filesystem;
namespace files = trackbed::files;

long passed = 0;
long failed = 0;

void check(bool holds, const std::string& what) {
  ++(holds ? passed : failed);
  if (!holds && failed <= 20) {
    std::printf("FAILED %s\n", what.c_str());
  }
}

// A fresh folder, removed at the end.
class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("trackbed-files" + std::to_string(getpid()))) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ / name; }

 private:
  fs::path path_;
};

std::string joined(const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& name : names) {
    all.append(name).push_back('\0');
  }
  return all;
}

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void test_read_stamps() {
  const Folder folder;
  constexpr std::size_t kFiles = 700;
  std::vector<std::string> names;
  for (std::size_t file = 0; file < kFiles; ++file) {
    names.push_back(folder / std::to_string(file));
    if (file % 7 != 0) {
      std::ofstream(names.back()) << std::string(file, 'x');
    }
  }
  names.push_back(folder / std::string(300, 'n'));
  for (const int threads : {1, 2, 7}) {
    trackbed::Poll poll;
    std::vector<files::FileStamp> stamps(names.size());
    files::read_stamps(joined(names), stamps, threads, poll);
    for (std::size_t file = 0; file < kFiles; ++file) {
      const std::int64_t wanted = file % 7 == 0 ? -1 : static_cast<std::int64_t>(file);
      check(stamps[file].size_bytes == wanted && (stamps[file].inode < 0) == (wanted < 0) &&
                (stamps[file].modified_ns == -1) == (wanted < 0),
            "stamp of file " + std::to_string(file));
    }
    check(stamps.back().size_bytes == -1 && stamps.back().modified_ns == ENAMETOOLONG, "stamp of a refused name");
  }
}

void test_read_parts() {
  const Folder folder;
  std::ofstream(folder / "digits") << "0123456789";
  const std::string paths = joined({folder / "digits", folder / "digits", folder / "absent"});
  const std::vector<std::int64_t> starts{2, 8, 0};
  const std::vector<std::int64_t> sizes{3, 3, 1};
  std::vector<std::byte> content(7);
  std::vector<files::FileStamp> stamps(3);
  trackbed::Poll poll;
  files::read_parts(paths, starts, sizes, content, stamps, poll);
  check(stamps[0].size_bytes == 10 && stamps[1].inode == -1 && stamps[2].inode == -1, "read_parts stamps");
  check(content[0] == std::byte{'2'} && content[2] == std::byte{'4'}, "read_parts content");
}

// An index of 400 sequences whose pointers end beyond its head, one whose header claims more, and none.
void test_read_index_ends() {
  const Folder folder;
  constexpr std::int64_t kSequences = 400;
  std::string content(34 + 12 * kSequences + 8 * (kSequences + 1), 'x');
  const auto put = [&](std::int64_t at, std::int64_t number, std::size_t size) {
    std::memcpy(content.data() + at, &number, size);
  };
  put(18, kSequences, 8);
  put(26, kSequences + 1, 8);
  put(34 + 4 * (kSequences - 1), -3, 4);
  put(34 + 12 * kSequences - 8, -5, 8);
  put(static_cast<std::int64_t>(content.size()) - 8, 7, 8);
  std::ofstream(folder / "a") << content;
  put(18, std::int64_t{1} << 62, 8);
  std::ofstream(folder / "b") << content;
  const std::string paths = joined({folder / "a", folder / "b", folder / "c"});
  for (const int threads : {1, 3}) {
    std::vector<std::byte> read(3 * files::kIndexEndsBytes);
    std::vector<files::IndexEnds> ends(3);
    trackbed::Poll poll;
    files::read_index_ends(paths, read, ends, threads, poll);
    check(ends[0].error == 0 && ends[0].head_bytes == 4130 && ends[0].tail_bytes == 4096, "index ends: bytes");
    check(ends[0].last_length == -3 && ends[0].last_pointer == -5 && ends[0].last_border == 7, "index ends: numbers");
    check(ends[0].changed_ns >= ends[0].stamp.modified_ns, "index ends: time of the last change");
    check(ends[1].error == 0 && ends[1].last_pointer == 0 && ends[1].last_border == 0, "index ends: counts too high");
    check(ends[2].error == ENOENT && ends[2].stamp.size_bytes == -1, "index ends: no file");
    check(std::memcmp(read.data() + 4130, content.data() + content.size() - 4096, 4096) == 0, "index ends: tail");
  }
}

// Sets of two files and a claim each.
class Sets {
 public:
  explicit Sets(const Folder& folder) : folder_(folder) {}

  void add(const std::string& name, files::Claim claim, bool is_written = true) {
    static const std::vector<std::byte> bytes(5000);
    const std::span<const std::byte> all(bytes);
    for (const char* ending : {"-1", "-2", ".json"}) {
      paths_.push_back(folder_ / (name + ending));
      partials_.push_back(paths_.back() + ".partial");
    }
    if (is_written) {
      parts_.insert(parts_.end(), {all.first(3), all, all.first(7), all.first(1), all.first(0)});
      num_parts_.insert(num_parts_.end(), {2, 1, 2});
    } else {
      std::ofstream(partials_.end()[-3]) << std::string(5003, '.');
      parts_.insert(parts_.end(), {all.first(7), all.first(1)});
      num_parts_.insert(num_parts_.end(), {-1, 1, 1});
    }
    num_files_.push_back(3);
    claims_.push_back(static_cast<std::uint8_t>(claim));
  }

  std::vector<std::int32_t> commit(bool may_be_unnamed) {
    stamps.resize(paths_.size());
    std::vector<std::int32_t> errors(num_files_.size());
    trackbed::Poll poll;
    const std::string paths = joined(paths_);
    const std::string partials = joined(partials_);
    files::commit_file_sets({.paths = paths,
                             .partials = partials,
                             .num_parts = num_parts_,
                             .parts = parts_,
                             .num_files = num_files_,
                             .claims = claims_,
                             .may_be_unnamed = may_be_unnamed},
                            stamps, errors, poll);
    return errors;
  }

  bool is_there(const std::string& name) const {
    const auto has = [&](const char* ending, std::size_t size) {
      return content_of(folder_ / (name + ending)).size() == size;
    };
    return has("-1", 5003) && has("-2", 7) && has(".json", 1);
  }

  bool leaves_partials() const {
    for (const std::string& path : partials_) {
      if (fs::exists(path)) {
        return true;
      }
    }
    return false;
  }

  std::vector<files::FileStamp> stamps;

 private:
  const Folder& folder_;
  std::vector<std::string> paths_;
  std::vector<std::string> partials_;
  std::vector<std::int64_t> num_parts_;
  std::vector<std::span<const std::byte>> parts_;
  std::vector<std::int64_t> num_files_;
  std::vector<std::uint8_t> claims_;
};

void test_commit_file_sets() {
  using files::Claim;
  for (const bool may_be_unnamed : {false, true}) {
    const Folder folder;
    Sets sets(folder);
    sets.add("fresh", Claim::kTake);
    std::ofstream(folder / "unclaimed-1") << "old";
    sets.add("unclaimed", Claim::kTake);
    std::ofstream(folder / "taken.json") << "taken";
    sets.add("taken", Claim::kTake);
    std::ofstream(folder / "replaced.json") << "old";
    std::ofstream(folder / "replaced-2") << "old";
    sets.add("replaced", Claim::kReplace);
    std::ofstream(folder / "joined.json") << "1";
    std::ofstream(folder / "joined-1") << std::string(5003, 'x');
    sets.add("joined", Claim::kNone);
    std::ofstream(folder / "whole.json") << "1";
    std::ofstream(folder / "whole-1") << std::string(5003, 'x');
    std::ofstream(folder / "whole-2") << std::string(7, 'x');
    sets.add("whole", Claim::kNone);
    sets.add("filled", Claim::kTake, false);
    const std::vector<std::int32_t> wanted{0, 0, EEXIST, 0, 0, EALREADY, 0};
    check(sets.commit(may_be_unnamed) == wanted, "commit_file_sets errors");
    for (const char* name : {"fresh", "unclaimed", "replaced", "joined", "filled"}) {
      check(sets.is_there(name), std::string("commit_file_sets files of ") + name);
    }
    check(sets.stamps[0].size_bytes == 5003 && sets.stamps[2].size_bytes == 1, "commit_file_sets stamps");
    check(!fs::exists(folder / "taken-1") && content_of(folder / "taken.json") == "taken", "the taken name");
    check(content_of(folder / "whole-1") == std::string(5003, 'x'), "the set that was whole");
    check(content_of(folder / "joined-1") == std::string(5003, '\0'), "the set that was not");
    check(!sets.leaves_partials(), "commit_file_sets leaves no partial file");
  }
}

// The file that was complete before is left to its owner.
void test_commit_file_sets_of_a_taken_name() {
  for (const bool may_be_unnamed : {false, true}) {
    const Folder folder;
    std::ofstream(folder / "taken.json") << "taken";
    Sets sets(folder);
    sets.add("taken", files::Claim::kTake, false);
    check(sets.commit(may_be_unnamed) == std::vector<std::int32_t>{EEXIST}, "commit_file_sets of a taken name");
    check(fs::exists(folder / "taken-1.partial") && !fs::exists(folder / "taken-2.partial"), "partial files left");
  }
}

void test_exchange_names() {
  const Folder folder;
  fs::create_directory(folder / "one");
  std::ofstream(folder / "one/name") << "one";
  std::ofstream(folder / "other") << "other";
  check(files::exchange_names((folder / "one").c_str(), (folder / "other").c_str()) == 0, "exchange_names");
  check(content_of(folder / "one") == "other" && content_of(folder / "other/name") == "one", "exchanged content");
  check(files::exchange_names((folder / "one").c_str(), (folder / "absent").c_str()) == ENOENT, "an absent name");
}

}  // namespace

int main() {
  test_read_stamps();
  test_read_parts();
  test_read_index_ends();
  test_commit_file_sets();
  test_commit_file_sets_of_a_taken_name();
  test_exchange_names();
  std::printf("%ld passed, %ld failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
