#include "trackbed/sample_index.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "trackbed/team.hpp"

namespace trackbed {

namespace {

constexpr std::size_t kChunk = std::size_t{1} << 15;  // visits whose lengths stay in a core's cache
constexpr std::size_t kAhead = 256;                   // visits between the prefetch of a length and its use

std::int32_t length_of(std::span<const std::byte> lengths, std::size_t document) {
  std::int32_t length;
  std::memcpy(&length, lengths.data() + document * sizeof length, sizeof length);
  return length;
}

// Result of one thread's gather() of the lengths of a chunk of visits.
struct Gathered {
  std::int64_t sum = 0;
  bool valid = true;
  bool stopped = false;  // true to end all threads in this round
};

Gathered sum_of(const std::int32_t* lengths, std::size_t count) {
  std::int64_t sum = 0;
  std::int32_t negative = 0;
  for (std::size_t k = 0; k < count; ++k) {
    sum += lengths[k];
    negative |= lengths[k];
  }
  return {.sum = sum, .valid = negative >= 0};
}

// Visits whose lengths are looked up by document.
template <class Visit>
struct Scattered {
  static constexpr bool kMustReachEnd = false;

  std::span<const std::byte> lengths;
  std::span<const Visit> visits;

  std::size_t size() const { return visits.size(); }

  std::int32_t length(std::size_t visit) const { return length_of(lengths, static_cast<std::size_t>(visits[visit])); }

  bool is_valid(std::size_t visit) const {
    return static_cast<std::size_t>(visits[visit]) < lengths.size() / sizeof(std::int32_t) && length(visit) >= 0;
  }

  // Gathers the lengths of visited documents into `found`. Several short loops, each of which vectorizes or overlaps
  // many iterations: the number of outstanding cache misses determines the speed.
  Gathered gather(std::size_t first, std::size_t count, std::int32_t* found) const {
    using Document = std::make_unsigned_t<Visit>;
    const std::uint64_t num_documents = lengths.size() / sizeof(std::int32_t);
    constexpr std::uint64_t kHighest = std::numeric_limits<Document>::max();
    const auto last = static_cast<Document>(std::min(num_documents - 1, kHighest));
    const auto mine = visits.subspan(first, count);
    Document highest = 0;
    for (const Visit visit : mine) {
      highest = std::max(highest, static_cast<Document>(visit));
    }
    if (num_documents == 0 || highest > last) {
      return {.sum = 0, .valid = false};
    }
    const std::size_t ahead = count < kAhead ? 0 : count - kAhead;
    for (std::size_t k = 0; k < ahead; ++k) {
      __builtin_prefetch(lengths.data() + static_cast<std::size_t>(mine[k + kAhead]) * sizeof(std::int32_t), 0, 2);
      found[k] = length_of(lengths, static_cast<std::size_t>(mine[k]));
    }
    for (std::size_t k = ahead; k < count; ++k) {
      found[k] = length_of(lengths, static_cast<std::size_t>(mine[k]));
    }
    return sum_of(found, count);
  }
};

// Visits that carry the length of their document.
struct Paired {
  static constexpr bool kMustReachEnd = true;  // all documents are written, even if fewer hold all rows

  std::span<const std::uint64_t> pairs;
  std::span<std::int32_t> documents;

  std::size_t size() const { return pairs.size(); }

  std::int32_t length(std::size_t visit) const { return static_cast<std::int32_t>(pairs[visit] >> 32); }

  bool is_valid(std::size_t visit) const { return length(visit) >= 0; }

  Gathered gather(std::size_t first, std::size_t count, std::int32_t* found) const {
    for (std::size_t k = 0; k < count; ++k) {
      documents[first + k] = static_cast<std::int32_t>(pairs[first + k]);
      found[k] = length(first + k);
    }
    return sum_of(found, count);
  }
};

// Writes the rows [row, stop), which begin in a chunk of visits that starts `before` tokens into the stream.
template <class Row>
void cut(const std::int32_t* lengths, std::size_t first_visit, std::int64_t before, std::int64_t sequence_length,
         std::int64_t extra_token, std::size_t row, std::size_t stop, std::span<Row> rows) {
  std::int64_t offset = static_cast<std::int64_t>(row) * sequence_length - before;  // of the row in visit k
  for (std::size_t k = 0; row < stop; ++row, offset += sequence_length) {
    for (; offset > lengths[k] - extra_token; ++k) {
      offset -= lengths[k];
    }
    rows[2 * row] = static_cast<Row>(first_visit + k);
    rows[2 * row + 1] = static_cast<Row>(offset);
  }
}

// Cuts a stream of visits into samples. See sample_index() for `rows` and the result.
template <class Stream, class Row>
std::size_t cut_stream(const Stream& stream, std::int64_t sequence_length, std::int64_t extra_token,
                       std::span<Row> rows, std::int64_t num_threads, Poll& poll) {
  rows[0] = 0;
  rows[1] = 0;
  const std::size_t num_rows = rows.size() / 2;
  // Number of rows that begin in the first `tokens` tokens of the stream.
  const auto rows_within = [&](std::int64_t tokens) {
    const std::int64_t behind = tokens - extra_token;
    const std::int64_t found = behind < 0 ? 0 : behind / sequence_length;
    return static_cast<std::size_t>(std::min(found, static_cast<std::int64_t>(num_rows) - 1)) + 1;
  };

  std::int64_t total = 0;  // tokens in all processed chunks
  bool all_valid = true;
  std::exception_ptr failure;  // exception of the poll
  const auto chunks = static_cast<std::int64_t>((stream.size() + kChunk - 1) / kChunk);
  // Sums of two rounds, used alternately, because a thread may be one round ahead of another.
  std::vector<Gathered> gathered(2 * static_cast<std::size_t>(std::max<std::int64_t>(num_threads, 1)));
  const std::int64_t wanted = std::min(num_threads, std::max<std::int64_t>(chunks, 1));
  const auto buffers = std::make_unique_for_overwrite<std::int32_t[]>(static_cast<std::size_t>(wanted) * kChunk);
  run_team(wanted, [&](std::int64_t thread, std::int64_t team, std::barrier<>& barrier) {
    std::int32_t* const found = buffers.get() + static_cast<std::size_t>(thread) * kChunk;
    std::int64_t before_round = 0;
    bool valid = true;
    for (std::int64_t round = 0;
         round * team < chunks && valid && (Stream::kMustReachEnd || rows_within(before_round) < num_rows); ++round) {
      Gathered* const sums = gathered.data() + (round % 2) * team;
      const auto first = std::min(static_cast<std::size_t>(round * team + thread) * kChunk, stream.size());
      sums[thread] = stream.gather(first, std::min(kChunk, stream.size() - first), found);
      sums[thread].stopped = thread == 0 && failure;
      barrier.arrive_and_wait();
      if (sums[0].stopped) {  // all threads see this in the same round
        break;
      }
      const std::int64_t before_this = before_round;
      std::int64_t before = before_round;
      for (std::int64_t other = 0; other < team; ++other) {
        before += other < thread ? sums[other].sum : 0;
        before_round += sums[other].sum;
        valid = valid && sums[other].valid;
      }
      if (valid) {
        cut(found, first, before, sequence_length, extra_token, rows_within(before),
            rows_within(before + sums[thread].sum), rows);
      }
      if (thread == 0 && !failure) {
        try {
          poll(static_cast<std::int64_t>(rows_within(before_this)));  // other threads may still write this round's rows
        } catch (...) {
          failure = std::current_exception();
        }
      }
    }
    if (thread == 0) {
      total = before_round;
      all_valid = valid;
    }
  });
  if (failure) {
    std::rethrow_exception(failure);
  }
  if (!all_valid) {
    std::size_t visit = 0;
    while (visit < stream.size() && stream.is_valid(visit)) {
      ++visit;
    }
    return visit;
  }

  // Without the extra token a row may point to the end of an empty last visit, as in Megatron Core.
  if (std::size_t row = rows_within(total); row < num_rows) {
    std::size_t last = std::max<std::size_t>(stream.size(), 1) - 1;
    while (extra_token == 1 && last > 0 && stream.length(last) == 0) {
      --last;
    }
    const std::int64_t end = stream.size() == 0 ? 0 : stream.length(last) - extra_token;
    for (; row < num_rows; ++row) {
      rows[2 * row] = static_cast<Row>(last);
      rows[2 * row + 1] = static_cast<Row>(std::max<std::int64_t>(end, 0));
    }
  }
  return stream.size();
}

}  // namespace

template <class Visit, class Row>
std::size_t sample_index(std::span<const std::byte> lengths, std::span<const Visit> visits,
                         std::int64_t sequence_length, std::int64_t extra_token, std::span<Row> rows,
                         std::int64_t num_threads, Poll& poll) {
  return cut_stream(Scattered<Visit>{lengths, visits}, sequence_length, extra_token, rows, num_threads, poll);
}

void pair_lengths(std::span<const std::int32_t> documents, std::span<const std::byte> lengths,
                  std::span<std::uint64_t> pairs, Poll& poll) {
  for (std::size_t epoch = 0; epoch < pairs.size(); epoch += documents.size()) {
    for (std::size_t first = 0; first < documents.size(); first += kChunk) {
      const std::size_t stop = std::min(first + kChunk, documents.size());
      for (std::size_t k = first; k < stop; ++k) {
        const auto length = static_cast<std::uint32_t>(length_of(lengths, k));
        pairs[epoch + k] = std::uint64_t{length} << 32 | static_cast<std::uint32_t>(documents[k]);
      }
      poll(static_cast<std::int64_t>(epoch + stop));
    }
  }
}

std::size_t cut_pairs(std::span<const std::uint64_t> pairs, std::span<std::int32_t> documents,
                      std::int64_t sequence_length, std::int64_t extra_token, std::span<std::int32_t> rows,
                      std::int64_t num_threads, Poll& poll) {
  return cut_stream(Paired{pairs, documents}, sequence_length, extra_token, rows, num_threads, poll);
}

#define TRACKBED_SAMPLE_INDEX(Visit, Row)                                                                           \
  template std::size_t sample_index(std::span<const std::byte>, std::span<const Visit>, std::int64_t, std::int64_t, \
                                    std::span<Row>, std::int64_t, Poll&);

TRACKBED_SAMPLE_INDEX(std::int32_t, std::int32_t)
TRACKBED_SAMPLE_INDEX(std::int32_t, std::int64_t)
TRACKBED_SAMPLE_INDEX(std::int64_t, std::int64_t)

}  // namespace trackbed
