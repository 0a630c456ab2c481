#include "trackbed/sentence_mapping.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <utility>

namespace trackbed {

namespace {

constexpr std::int32_t kLongSentence = 512;
constexpr std::uint64_t kMostNarrow = 0xffffffff;
constexpr std::int64_t kPolled = 1 << 16;  // sentences between two polls
constexpr std::size_t kAhead = 64;         // rows between a prefetch and its swap

std::int32_t length_at(std::span<const std::byte> lengths, std::int64_t sentence) {
  std::int32_t length;
  std::memcpy(&length, lengths.data() + sentence * static_cast<std::int64_t>(sizeof(length)), sizeof(length));
  return length;
}

// Target lengths of samples, in the order in which they are drawn.
class Targets {
 public:
  explicit Targets(const MappingRules& rules)
      : generator_(static_cast<std::uint32_t>(rules.seed)),
        ratio_(static_cast<std::uint64_t>(rules.ratio)),
        max_length_(static_cast<std::uint64_t>(rules.max_length)) {}

  std::int64_t operator()() {
    if (ratio_ == 0) {
      return static_cast<std::int64_t>(max_length_);
    }
    const auto drawn = static_cast<std::uint32_t>(generator_());
    const bool is_short = ratio_ > kMostNarrow ? drawn == 0 : drawn % static_cast<std::uint32_t>(ratio_) == 0;
    return static_cast<std::int64_t>(is_short ? 2 + drawn % (max_length_ - 1) : max_length_);
  }

 private:
  std::mt19937 generator_;
  std::uint64_t ratio_;
  std::uint64_t max_length_;
};

// Rows in memory that grows; large blocks are moved by the system without a copy.
template <class Number>
class Rows {
 public:
  Rows() { grow(); }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  ~Rows() { std::free(numbers_); }

  void add(std::int64_t first, std::int64_t stop, std::int64_t target) {
    if (count_ == room_) {
      grow();
    }
    Number* const row = numbers_ + 3 * count_++;
    row[0] = static_cast<Number>(first);
    row[1] = static_cast<Number>(stop);
    row[2] = static_cast<Number>(target);
  }

  std::size_t count() const { return count_; }
  std::span<Number> numbers() { return {numbers_, 3 * count_}; }
  Mapping<Number> release() { return {std::exchange(numbers_, nullptr), count_}; }

 private:
  void grow() {
    const std::size_t room = std::max<std::size_t>(1024, 2 * room_);
    auto* const grown = static_cast<Number*>(std::realloc(numbers_, 3 * room * sizeof(Number)));
    if (grown == nullptr) {
      throw std::bad_alloc();
    }
    numbers_ = grown;
    room_ = room;
  }

  Number* numbers_ = nullptr;
  std::size_t count_ = 0;
  std::size_t room_ = 0;
};

// Adds all rows, before the shuffle.
template <class Number>
void cut(std::span<const Sentences> documents, std::span<const std::byte> lengths, const MappingRules& rules,
         Rows<Number>& rows, Poll& poll) {
  if (documents.empty()) {
    return;
  }
  Targets next_target(rules);
  std::int64_t unpolled = 0;
  for (std::int64_t epoch = 0; epoch < rules.num_epochs && rows.count() < rules.num_samples; ++epoch) {
    for (const auto [first, stop] : documents) {
      std::int64_t begin = first;
      std::int64_t length = 0;
      std::int64_t target = next_target();
      for (std::int64_t sentence = first; sentence < stop; ++sentence) {
        length += length_at(lengths, sentence);
        const std::int64_t left = stop - sentence - 1;
        const std::int64_t taken = sentence - begin + 1;
        if (left == 0 || (length >= target && left > 1 && taken >= rules.min_sentences)) {
          rows.add(begin, sentence + 1, target);
          begin = sentence + 1;
          length = 0;
          target = next_target();
        }
        if (++unpolled == kPolled) {
          unpolled = 0;
          poll(static_cast<std::int64_t>(rows.count()));
        }
      }
    }
  }
}

// Swaps rows from the last one down, each with one before it or itself, which is prefetched.
template <class Number>
void shuffle(std::span<Number> rows, std::uint64_t seed, Poll& poll) {
  std::mt19937_64 generator(seed);
  std::uint64_t targets[kAhead];
  const std::uint64_t count = rows.size() / 3;
  std::uint64_t undrawn = count;
  const auto draw = [&] {
    --undrawn;
    const std::uint64_t target = generator() % (undrawn + 1);
    targets[undrawn % kAhead] = target;
    __builtin_prefetch(&rows[3 * target]);
  };
  for (std::uint64_t row = count; row-- > 1;) {
    while (undrawn > 1 && undrawn + kAhead > row + 1) {
      draw();
    }
    const std::uint64_t target = targets[row % kAhead];
    for (std::uint64_t column = 0; column < 3; ++column) {
      std::swap(rows[3 * row + column], rows[3 * target + column]);
    }
    if (row % kPolled == 0) {
      poll(static_cast<std::int64_t>(count - row));
    }
  }
}

}  // namespace

std::size_t find_documents(std::span<const std::int64_t> borders, std::span<const std::byte> lengths,
                           std::int64_t min_sentences, std::span<Sentences> documents, Poll& poll) {
  std::size_t count = 0;
  std::int64_t unpolled = 0;
  for (std::size_t document = 0; document + 1 < borders.size(); ++document) {
    const std::int64_t first = borders[document];
    const std::int64_t stop = borders[document + 1];
    const auto has_long_sentence = [&] {
      for (std::int64_t sentence = first; sentence < stop; ++sentence) {
        if (length_at(lengths, sentence) > kLongSentence) {
          return true;
        }
      }
      return false;
    };
    if (stop - first >= min_sentences && (stop - first == 1 || !has_long_sentence())) {
      documents[count++] = {first, stop};
    }
    unpolled += 1 + stop - first;
    if (unpolled >= kPolled) {
      unpolled = 0;
      poll(0);
    }
  }
  return count;
}

template <class Number>
Mapping<Number> build_mapping(std::span<const Sentences> documents, std::span<const std::byte> lengths,
                              const MappingRules& rules, Poll& poll) {
  Rows<Number> rows;
  cut(documents, lengths, rules, rows, poll);
  shuffle(rows.numbers(), static_cast<std::uint64_t>(rules.seed) + 1, poll);
  return rows.release();
}

template Mapping<std::uint32_t> build_mapping(std::span<const Sentences>, std::span<const std::byte>,
                                              const MappingRules&, Poll&);
template Mapping<std::uint64_t> build_mapping(std::span<const Sentences>, std::span<const std::byte>,
                                              const MappingRules&, Poll&);

}  // namespace trackbed
