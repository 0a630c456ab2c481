#include "trackbed/sample_spans.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace trackbed {

namespace {

template <class Number>
Number load(const std::byte* numbers, std::int64_t at) {
  Number number;
  std::memcpy(&number, numbers + at * static_cast<std::int64_t>(sizeof(Number)), sizeof(Number));
  return number;
}

std::int64_t load_signed(const std::byte* numbers, std::int64_t bytes, std::int64_t at) {
  return bytes == 4 ? load<std::int32_t>(numbers, at) : load<std::int64_t>(numbers, at);
}

// Difference with wrap-around for inconsistent arrays; the result is checked like any other number.
std::int64_t difference(std::int64_t number, std::int64_t from) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(number) - static_cast<std::uint64_t>(from));
}

// Sum with wrap-around, likewise.
std::int64_t add(std::int64_t number, std::int64_t other) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(number) + static_cast<std::uint64_t>(other));
}

bool is_in(std::int64_t number, std::int64_t stop) { return number >= 0 && number < stop; }

// Bisection: the first number in [0, stop) for which `holds`, or `stop`. Any number if `holds` is not monotonic.
template <class Holds>
std::int64_t first_that(std::int64_t stop, const Holds& holds) {
  std::int64_t start = 0;
  while (start < stop) {
    const std::int64_t middle = start + (stop - start) / 2;
    if (holds(middle)) {
      stop = middle;
    } else {
      start = middle + 1;
    }
  }
  return start;
}

struct Place {
  std::int64_t visit;
  std::int64_t offset;
};

std::int64_t row_at(const SampleSource& source, std::int64_t position) {
  return source.shuffle_bytes == 4 ? load<std::uint32_t>(source.shuffle, position)
                                   : load<std::int64_t>(source.shuffle, position);
}

// Start of the sample of a row.
Place place_of(const SampleSource& source, std::int64_t row) {
  return {load_signed(source.rows, source.row_bytes, 2 * row), load_signed(source.rows, source.row_bytes, 2 * row + 1)};
}

// The fetched bytes [start, stop) of a file, or null if not all of them were fetched.
const std::byte* find_fetched(std::span<const Fetched> fetched, std::int64_t file, std::int64_t start,
                              std::int64_t stop) {
  const auto after = first_that(static_cast<std::int64_t>(fetched.size()), [&](auto at) {
    const Fetched& piece = fetched[static_cast<std::size_t>(at)];
    return piece.file > file || (piece.file == file && piece.start > start);
  });
  if (after == 0) {
    return nullptr;
  }
  const Fetched& piece = fetched[static_cast<std::size_t>(after - 1)];
  return piece.file == file && piece.start <= start && stop <= piece.stop ? piece.bytes + (start - piece.start)
                                                                          : nullptr;
}

// Adds `count` tokens from a byte of a file on, or what must be fetched of them. Returns false if they do not all lie
// inside the file.
template <class Plan>
bool add_span(const TokenFiles& files, std::int64_t number, std::int64_t byte, std::int64_t count,
              std::int64_t token_bytes, Plan& plan) {
  const TokenFile& file = files.files[static_cast<std::size_t>(number)];
  if (byte < 0 || byte > file.size_bytes || count < 0 || count > (file.size_bytes - byte) / token_bytes) {
    return false;
  }
  const std::int64_t stop = byte + count * token_bytes;
  const std::byte* const tokens =
      file.tokens != nullptr ? file.tokens + byte : find_fetched(files.fetched, number, byte, stop);
  if (tokens == nullptr && count > 0) {
    plan.missing.push_back({number, byte, stop});
  }
  plan.spans.push_back({tokens, count});
  return true;
}

// The file that has a sequence of its dataset, if any has.
const TokenFile& file_of(std::span<const TokenFile> files, std::int64_t sequence) {
  const auto after = static_cast<std::size_t>(first_that(static_cast<std::int64_t>(files.size()), [&](auto file) {
    return files[static_cast<std::size_t>(file)].first_sequence > sequence;
  }));
  return files[after == 0 ? 0 : after - 1];
}

std::uint64_t load_unsigned(const std::byte* numbers, std::int64_t bytes, std::int64_t at) {
  return bytes == 4 ? load<std::uint32_t>(numbers, at) : load<std::uint64_t>(numbers, at);
}

class Planner {
 public:
  Planner(const SampleSource& source, const TokenFiles& files, std::int64_t length, std::int64_t extra,
          SampleSpans& plan)
      : source_(source),
        all_files_(files),
        files_(files.files.subspan(static_cast<std::size_t>(source.first_file),
                                   static_cast<std::size_t>(source.num_files))),
        token_bytes_(token_bytes_of(source.dtype)),
        length_(length),
        extra_(extra),
        plan_(plan) {}

  Planned operator()(std::int64_t position) {
    if (position < 0 && source_.visits != nullptr) {
      position += source_.num_samples;
    }
    const bool is_possible = token_bytes_ > 0 && is_in(position, source_.num_samples) &&
                             (source_.visits == nullptr ? add_stretch(position) : add_visits(position));
    return !is_possible                                    ? Planned::refused
           : plan_.absent.empty() && plan_.missing.empty() ? Planned::whole
                                                           : Planned::absent;
  }

 private:
  // Adds the visited documents; the first one from the sample's start, the last one to the sample's end.
  bool add_visits(std::int64_t position) {
    const std::int64_t row = row_at(source_, position);
    if (!is_in(row, source_.num_samples)) {
      return false;
    }
    const auto [first, begin] = place_of(source_, row);
    const auto [last, end] = place_of(source_, row + 1);
    if (first < 0 || first > last || !is_in(last, source_.num_visits)) {
      return false;
    }
    std::int64_t done = 0;
    for (std::int64_t visit = first; visit <= last; ++visit) {
      const std::int64_t document = load_signed(source_.visits, source_.visit_bytes, visit);
      if (!add_document(document, visit == first ? begin : 0, visit == last, end, done)) {
        return false;
      }
    }
    const bool may_be_short = source_.may_be_short != 0 && row == source_.num_samples - 1;
    return done == length_ || may_be_short || !plan_.absent.empty();
  }

  // Adds the tokens of a document from `begin` to its end, or, if it is the last one, to `end` plus the extra token.
  bool add_document(std::int64_t document, std::int64_t begin, bool is_last, std::int64_t end, std::int64_t& done) {
    const TokenFile& file = file_of(files_, document);
    const std::int64_t sequence = difference(document, file.first_sequence);
    if (!is_in(sequence, file.num_sequences) || begin < 0 || begin > kMostTokens || end > kMostTokens) {
      return false;
    }
    const std::int64_t number = &file - files_.data() + source_.first_file;
    if (file.lengths == nullptr) {
      plan_.absent.push_back(number);
      return true;
    }
    const std::int64_t size = load<std::int32_t>(file.lengths, sequence);
    const std::int64_t stop = is_last ? end + extra_ : size;
    if (stop < begin || stop > size || stop - begin > length_ - done) {
      return false;
    }
    std::int64_t byte = 0;
    done += stop - begin;
    plan_.borders.push_back(done);
    return !__builtin_add_overflow(load<std::int64_t>(file.pointers, sequence), begin * token_bytes_, &byte) &&
           add_span(all_files_, number, byte, stop - begin, token_bytes_, plan_);
  }

  bool add_stretch(std::int64_t sample) {
    std::int64_t byte = 0;
    std::int64_t stop = 0;
    if (__builtin_mul_overflow(sample, (length_ - extra_) * token_bytes_, &byte) ||
        __builtin_add_overflow(byte, source_.origin_byte, &byte) || byte < 0 ||
        __builtin_add_overflow(byte, length_ * token_bytes_, &stop)) {
      return false;
    }
    const std::int64_t begin = byte;
    std::int64_t missing = length_;
    auto number = first_that(
        source_.num_files, [&](std::int64_t file) { return files_[static_cast<std::size_t>(file)].first_byte > byte; });
    for (--number; missing > 0; ++number) {
      if (!is_in(number, source_.num_files)) {
        return false;
      }
      const TokenFile& file = files_[static_cast<std::size_t>(number)];
      const std::int64_t inside = difference(byte, file.first_byte);
      const std::int64_t count = std::min(missing, difference(file.token_bytes, inside) / token_bytes_);
      if (count < 0) {
        return false;
      }
      missing -= count;
      byte += count * token_bytes_;
      if (file.lengths == nullptr) {
        plan_.absent.push_back(number + source_.first_file);
      } else if (!add_span(all_files_, number + source_.first_file, inside, count, token_bytes_, plan_) ||
                 !add_borders(file, begin)) {
        return false;
      }
    }
    return true;
  }

  // Adds the ends of the file's sequences inside the sample that begins at a byte. Returns false if the sequences are
  // not consecutive there.
  bool add_borders(const TokenFile& file, std::int64_t begin) {
    const auto start_of = [&](std::int64_t sequence) {
      std::int64_t start = 0;
      return __builtin_add_overflow(load<std::int64_t>(file.pointers, sequence), file.first_byte, &start) ? begin
                                                                                                          : start;
    };
    const std::int64_t stop = std::min(begin + length_ * token_bytes_, add(file.first_byte, file.token_bytes));
    auto next = first_that(file.num_sequences, [&](std::int64_t sequence) { return start_of(sequence) > begin; });
    std::int64_t start = file.first_byte;  // start of the next sequence if it follows the previous one
    if (next > 0) {
      start = add(start_of(next - 1), load<std::int32_t>(file.lengths, next - 1) * token_bytes_);
    }
    if (start <= begin && next > 0) {
      return false;
    }
    for (; start < stop; ++next) {
      if (next == file.num_sequences || start_of(next) != start || load<std::int32_t>(file.lengths, next) < 0) {
        return false;
      }
      if (start > begin) {
        plan_.borders.push_back((start - begin) / token_bytes_);
      }
      start = add(start, load<std::int32_t>(file.lengths, next) * token_bytes_);
    }
    return true;
  }

  static constexpr std::int64_t kMostTokens = std::int64_t{1} << 56;

  const SampleSource& source_;
  const TokenFiles& all_files_;
  std::span<const TokenFile> files_;  // those of the source
  std::int64_t token_bytes_;
  std::int64_t length_;
  std::int64_t extra_;
  SampleSpans& plan_;
};

}  // namespace

std::int64_t token_bytes_of(std::int64_t dtype) {
  switch (dtype) {
    case 1:
    case 2:
      return 1;
    case 3:
    case 8:
      return 2;
    case 4:
      return 4;
    case 5:
      return 8;
    default:
      return 0;
  }
}

void approach_plan(const SampleSource& source, std::span<const TokenFile> files, std::int64_t position, int step) {
  constexpr std::int64_t kMostVisits = 16;
  if (source.visits == nullptr || token_bytes_of(source.dtype) == 0 || !is_in(position, source.num_samples)) {
    return;
  }
  if (step == 0) {
    return __builtin_prefetch(source.shuffle + position * source.shuffle_bytes);
  }
  const std::int64_t row = row_at(source, position);
  if (!is_in(row, source.num_samples)) {
    return;
  }
  if (step == 1) {
    return __builtin_prefetch(source.rows + 2 * row * source.row_bytes);
  }
  const std::int64_t first = place_of(source, row).visit;
  const std::int64_t last = place_of(source, row + 1).visit;
  if (!is_in(first, source.num_visits) || !is_in(last, source.num_visits)) {
    return;
  }
  if (step == 2) {
    return __builtin_prefetch(source.visits + first * source.visit_bytes);
  }
  const TokenFile& file = files[static_cast<std::size_t>(source.first_file)];
  for (std::int64_t visit = first; visit <= last && visit - first < kMostVisits; ++visit) {
    const std::int64_t document = load_signed(source.visits, source.visit_bytes, visit);
    if (source.num_files == 1 && is_in(document, file.num_sequences) && file.lengths != nullptr) {
      __builtin_prefetch(file.lengths + document * static_cast<std::int64_t>(sizeof(std::int32_t)));
      __builtin_prefetch(file.pointers + document * static_cast<std::int64_t>(sizeof(std::int64_t)));
    }
  }
}

Planned plan_spans(const SampleSource& source, const TokenFiles& files, std::int64_t position, std::int64_t length,
                   std::int64_t extra, SampleSpans& plan) {
  plan.spans.clear();
  plan.borders.clear();
  plan.absent.clear();
  plan.missing.clear();
  return Planner(source, files, length, extra, plan)(position);
}

void prefetch_tokens(std::span<const Span> spans, std::int64_t token_bytes) {
  constexpr std::int64_t kLine = 64;
  std::int64_t lines = 512;
  for (const Span& span : spans) {
    for (std::int64_t byte = 0; byte < span.count * token_bytes && lines > 0; byte += kLine, --lines) {
      __builtin_prefetch(span.tokens + byte);
    }
  }
}

void read_ahead_long(std::span<const Span> spans, std::int64_t token_bytes) {
  constexpr std::size_t kLong = 32 << 10;
  constexpr std::size_t kStride = 128 << 10;  // Linux ignores what exceeds the largest request of the device
  static const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  for (const Span& span : spans) {
    const auto bytes = static_cast<std::size_t>(span.count * token_bytes);
    if (bytes < kLong) {
      continue;
    }
    const std::size_t before = reinterpret_cast<std::uintptr_t>(span.tokens) % page;
    auto* const start = const_cast<std::byte*>(span.tokens) - before;
    for (std::size_t done = 0; done < before + bytes; done += kStride) {
      madvise(start + done, std::min(kStride, before + bytes - done), MADV_WILLNEED);
    }
  }
}

FileSequence find_sequence(const SampleSource& source, std::span<const TokenFile> files, std::int64_t document) {
  const auto its_files =
      files.subspan(static_cast<std::size_t>(source.first_file), static_cast<std::size_t>(source.num_files));
  const TokenFile& file = file_of(its_files, document);
  return {&file - files.data(), difference(document, file.first_sequence)};
}

void approach_pieces(const SampleSource& source, std::span<const TokenFile> files,
                     std::span<const PackedPiece> pieces) {
  for (const PackedPiece& piece : pieces) {
    const auto [number, sequence] = find_sequence(source, files, piece.document);
    const TokenFile& file = files[static_cast<std::size_t>(number)];
    if (file.lengths != nullptr && is_in(sequence, file.num_sequences)) {
      __builtin_prefetch(file.lengths + sequence * static_cast<std::int64_t>(sizeof(std::int32_t)));
      __builtin_prefetch(file.pointers + sequence * static_cast<std::int64_t>(sizeof(std::int64_t)));
    }
  }
}

Planned plan_pieces(const SampleSource& source, const TokenFiles& files, std::span<const PackedPiece> pieces,
                    SampleSpans& plan) {
  plan.spans.clear();
  plan.borders.clear();
  plan.absent.clear();
  plan.missing.clear();
  const std::int64_t token_bytes = token_bytes_of(source.dtype);
  if (token_bytes == 0) {
    return Planned::refused;
  }
  for (const PackedPiece& piece : pieces) {
    const auto [number, sequence] = find_sequence(source, files.files, piece.document);
    const TokenFile& file = files.files[static_cast<std::size_t>(number)];
    if (!is_in(sequence, file.num_sequences)) {
      return Planned::refused;
    }
    if (file.lengths == nullptr) {
      if (plan.absent.empty() || plan.absent.back() != number) {
        plan.absent.push_back(number);
      }
      continue;
    }
    std::int64_t byte = 0;
    if (piece.start < 0 || piece.stop < piece.start || piece.stop >= load<std::int32_t>(file.lengths, sequence) ||
        __builtin_add_overflow(load<std::int64_t>(file.pointers, sequence), piece.start * token_bytes, &byte) ||
        !add_span(files, number, byte, piece.stop - piece.start + 1, token_bytes, plan)) {
      return Planned::refused;
    }
  }
  return plan.absent.empty() && plan.missing.empty() ? Planned::whole : Planned::absent;
}

Planned plan_sentences(const SampleSource& source, const TokenFiles& files, std::int64_t position,
                       SentenceSpans& plan) {
  constexpr std::uint64_t kMostSentences = std::uint64_t{1} << 24;  // more are damage, and would take memory
  plan.spans.clear();
  plan.absent.clear();
  plan.missing.clear();
  const std::int64_t token_bytes = token_bytes_of(source.dtype);
  const std::int64_t row = position < 0 ? position + source.num_samples : position;
  if (source.rows == nullptr || source.visits != nullptr || token_bytes == 0 || !is_in(row, source.num_samples)) {
    return Planned::refused;
  }
  const std::uint64_t first = load_unsigned(source.rows, source.row_bytes, 3 * row);
  const std::uint64_t stop = load_unsigned(source.rows, source.row_bytes, 3 * row + 1);
  plan.target = static_cast<std::int64_t>(load_unsigned(source.rows, source.row_bytes, 3 * row + 2));
  const auto its_files =
      files.files.subspan(static_cast<std::size_t>(source.first_file), static_cast<std::size_t>(source.num_files));
  const auto end = static_cast<std::uint64_t>(add(its_files.back().first_sequence, its_files.back().num_sequences));
  if (plan.target <= 0 || first >= stop || stop > end || stop - first > kMostSentences) {
    return Planned::refused;
  }
  for (std::uint64_t sentence = first; sentence < stop; ++sentence) {
    const TokenFile& file = file_of(its_files, static_cast<std::int64_t>(sentence));
    const std::int64_t sequence = difference(static_cast<std::int64_t>(sentence), file.first_sequence);
    const std::int64_t number = &file - files.files.data();
    if (file.lengths == nullptr) {
      if (plan.absent.empty() || plan.absent.back() != number) {
        plan.absent.push_back(number);
      }
      continue;
    }
    if (!is_in(sequence, file.num_sequences) ||
        !add_span(files, number, load<std::int64_t>(file.pointers, sequence),
                  load<std::int32_t>(file.lengths, sequence), token_bytes, plan)) {
      return Planned::refused;
    }
  }
  return plan.absent.empty() && plan.missing.empty() ? Planned::whole : Planned::absent;
}

}  // namespace trackbed
