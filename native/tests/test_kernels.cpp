// Tests of every kernel against a naive reference, at every instruction level of this processor. Takes an optional
// argument "short" for emulators and sanitizers.
//
// Random inputs come only from std::mt19937_64, whose stream the standard specifies, and never from a distribution,
// whose stream it does not: every platform gets the same inputs and must print the same golden checksums.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "trackbed/blend.hpp"
#include "trackbed/blend_loops.hpp"
#include "trackbed/block_permutation.hpp"
#include "trackbed/draw_targets.hpp"
#include "trackbed/epoch_samples.hpp"
#include "trackbed/gather.hpp"
#include "trackbed/gather_masked.hpp"
#include "trackbed/gather_packs.hpp"
#include "trackbed/instant.hpp"
#include "trackbed/interleaving.hpp"
#include "trackbed/isa.hpp"
#include "trackbed/legacy_shuffle.hpp"
#include "trackbed/narrow.hpp"
#include "trackbed/pack_balance.hpp"
#include "trackbed/pack_borders.hpp"
#include "trackbed/packing.hpp"
#include "trackbed/parallel.hpp"
#include "trackbed/permutation.hpp"
#include "trackbed/sample_index.hpp"
#include "trackbed/sentence_mapping.hpp"
#include "trackbed/small_indices.hpp"
#include "trackbed/split_mix.hpp"
#include "trackbed/square_sum.hpp"
#include "trackbed/sum_ranks.hpp"
#include "trackbed/token_count.hpp"
#include "trackbed/workers.hpp"

namespace {

using trackbed::Isa;

constexpr const char* kLevelNames[] = {"baseline", "avx2", "avx512"};

std::atomic<long> passed{0};
std::atomic<long> failed{0};

void check(bool holds, const std::string& what) {
  ++(holds ? passed : failed);
  if (!holds && failed <= 20) {
    std::printf("FAILED %s\n", what.c_str());
  }
}

std::vector<Isa> levels() {
  std::vector<Isa> all;
  for (int level = 0; level <= static_cast<int>(trackbed::best_isa()); ++level) {
    all.push_back(static_cast<Isa>(level));
  }
  return all;
}

std::string name_of(Isa level) { return kLevelNames[static_cast<int>(level)]; }

class Random {
 public:
  explicit Random(std::uint64_t seed) : bits_(seed) {}
  std::uint64_t next() { return bits_(); }
  std::size_t below(std::size_t bound) { return static_cast<std::size_t>(next() % bound); }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  std::mt19937_64 bits_;
};

// A product that no compiler can fuse with a following operation.
double rounded_product(double a, double b) {
  volatile double product = a * b;
  return product;
}

// ---------------------------------------------------------------- blending

enum class Weights { random, equal, few_values, ulp_apart, with_zeros, denormal, extreme, dyadic, kinds };

std::vector<double> make_weights(Random& random, std::size_t size, Weights kind) {
  std::vector<double> weights(size);
  double near = 1.0 / static_cast<double>(size);
  for (double& weight : weights) {
    switch (kind) {
      case Weights::equal:
        weight = 1.0 / static_cast<double>(size);
        break;
      case Weights::few_values:
        weight = static_cast<double>(1 + random.below(3)) / static_cast<double>(2 * size);
        break;
      case Weights::ulp_apart:
        weight = near;
        near = std::nextafter(near, random.below(2) == 0 ? 0.0 : 1.0);
        break;
      case Weights::with_zeros:
        weight = random.below(2) == 0 ? 0.0 : random.unit();
        break;
      case Weights::denormal:
        weight = static_cast<double>(random.below(5)) * std::numeric_limits<double>::denorm_min();
        break;
      case Weights::extreme:
        weight = random.below(3) == 0 ? -random.unit() : random.unit() * (random.below(2) == 0 ? 1e308 : 1e-308);
        break;
      case Weights::dyadic:
        weight = static_cast<double>(1 + random.below(8)) / 16.0;
        break;
      default:
        weight = random.unit() / static_cast<double>(size);
    }
  }
  return weights;
}

std::size_t naive_largest_error(const std::vector<double>& weights, const std::vector<double>& counts, double step) {
  std::size_t best = 0;
  for (std::size_t d = 1; d < weights.size(); ++d) {
    if (rounded_product(weights[d], step) - counts[d] > rounded_product(weights[best], step) - counts[best]) {
      best = d;
    }
  }
  return best;
}

struct Blend {
  std::vector<std::int64_t> dataset;
  std::vector<std::int64_t> sample;
};

// With `sizes`, a dataset is not drawn after that many samples; without, the draws are not limited.
Blend naive_blend(const std::vector<double>& weights, std::size_t num_samples, const std::vector<std::int64_t>& sizes) {
  Blend blend;
  std::vector<std::int64_t> drawn(weights.size(), 0);
  for (std::size_t i = 0; i < num_samples; ++i) {
    const double step = i == 0 ? 1.0 : static_cast<double>(i);
    std::size_t best = weights.size();
    double best_error = 0.0;
    for (std::size_t d = 0; d < weights.size(); ++d) {
      if (!sizes.empty() && drawn[d] == sizes[d]) {
        continue;
      }
      const double error = rounded_product(weights[d], step) - static_cast<double>(drawn[d]);
      if (best == weights.size() || error > best_error) {
        best = d;
        best_error = error;
      }
    }
    blend.dataset.push_back(static_cast<std::int64_t>(best));
    blend.sample.push_back(drawn[best]++);
  }
  return blend;
}

Blend naive_exhaustive(const std::vector<std::int64_t>& sizes) {
  std::int64_t total = 0;
  for (const std::int64_t size : sizes) {
    total += size;
  }
  std::vector<double> weights;
  for (const std::int64_t size : sizes) {
    weights.push_back(static_cast<double>(size) / static_cast<double>(total));
  }
  return naive_blend(weights, static_cast<std::size_t>(total), sizes);
}

template <class Id>
Blend run_greedy(const std::vector<double>& weights, std::size_t num_samples, Isa level) {
  std::vector<Id> dataset(num_samples, Id{-1});
  Blend blend{{}, std::vector<std::int64_t>(num_samples, -1)};
  trackbed::Poll poll;
  trackbed::greedy_blend<Id>(weights, dataset, blend.sample, level, poll);
  blend.dataset.assign(dataset.begin(), dataset.end());
  return blend;
}

template <class Id>
Blend run_exhaustive(const std::vector<std::int64_t>& sizes, std::size_t total, Isa level) {
  std::vector<Id> dataset(total, Id{-1});
  Blend blend{{}, std::vector<std::int64_t>(total, -1)};
  trackbed::Poll poll;
  trackbed::exhaustive_blend<Id>(sizes, dataset, blend.sample, level, poll);
  blend.dataset.assign(dataset.begin(), dataset.end());
  return blend;
}

bool equal(const Blend& one, const Blend& other) { return one.dataset == other.dataset && one.sample == other.sample; }

// Every size around the widths of the lanes (2, 4 and 8 doubles), then larger ones.
std::size_t size_of_round(Random& random, std::size_t round) {
  return round % 41 < 33 ? round % 41 + 1 : 34 + random.below(200);
}

void test_largest_error(std::size_t rounds) {
  Random random(11);
  for (std::size_t round = 0; round < rounds; ++round) {
    const std::size_t size = size_of_round(random, round);
    const auto kind = static_cast<Weights>(round % static_cast<std::size_t>(Weights::kinds));
    const std::vector<double> weights = make_weights(random, size, kind);
    const double step = static_cast<double>(1 + random.below(1000));
    std::vector<double> counts(size);
    for (std::size_t d = 0; d < size; ++d) {
      const double due = kind == Weights::extreme ? 0.0 : weights[d] * step;
      counts[d] = std::max(0.0, std::floor(due) + static_cast<double>(random.below(3)) - 1.0);
    }
    const std::size_t wanted = naive_largest_error(weights, counts, step);
    // The kernel must not read outside of its arrays, at any alignment.
    const std::size_t shift = random.below(8);
    std::vector<double> shifted_weights(shift, 1e9);
    std::vector<double> shifted_counts(shift, -1e9);
    shifted_weights.insert(shifted_weights.end(), weights.begin(), weights.end());
    shifted_counts.insert(shifted_counts.end(), counts.begin(), counts.end());
    shifted_weights.shrink_to_fit();
    shifted_counts.shrink_to_fit();
    for (const Isa level : levels()) {
      const std::size_t found = trackbed::blend_loops_at(level).largest_error(
          shifted_weights.data() + shift, shifted_counts.data() + shift, size, step);
      check(found == wanted, "largest_error " + name_of(level) + " round " + std::to_string(round) + " size " +
                                 std::to_string(size) + ": dataset " + std::to_string(wanted) + ", found " +
                                 std::to_string(found));
    }
  }
}

// All datasets but one or two have the same smallest error: the first one with a larger error is found in every lane.
void test_largest_error_in_every_lane() {
  for (std::size_t size = 1; size <= 33; ++size) {
    for (std::size_t first = 0; first < size; ++first) {
      for (std::size_t second = first; second < size; ++second) {
        std::vector<double> weights(size, 0.25);
        weights[first] = weights[second] = 0.5;
        const std::vector<double> counts(size, 1.0);
        for (const Isa level : levels()) {
          check(trackbed::blend_loops_at(level).largest_error(weights.data(), counts.data(), size, 3.0) == first,
                "largest_error " + name_of(level) + " size " + std::to_string(size) + ": first of " +
                    std::to_string(first) + " and " + std::to_string(second));
        }
      }
    }
  }
}

// x86-64 has every level; on other architectures all levels are the baseline.
void test_a_level_that_the_build_lacks_is_the_baseline() {
#if !defined(__x86_64__)
  for (const Isa level : {Isa::avx2, Isa::avx512}) {
    check(trackbed::blend_loops_at(level).draw == trackbed::blend_loops_at(Isa::baseline).draw,
          "level " + name_of(level) + " falls back to the baseline");
  }
#endif
}

void test_greedy_blend(std::size_t rounds) {
  Random random(22);
  for (std::size_t round = 0; round < rounds; ++round) {
    const std::size_t size = size_of_round(random, round);
    const auto kind = static_cast<Weights>(round % static_cast<std::size_t>(Weights::kinds));
    const std::vector<double> weights = make_weights(random, size, kind);
    // Some blends are long enough for the guessed thresholds to settle.
    const std::size_t num_samples = random.below(round % 10 == 0 ? 2000 : 120);
    const Blend wanted = naive_blend(weights, num_samples, {});
    for (const Isa level : levels()) {
      const std::string what = "greedy_blend " + name_of(level) + " round " + std::to_string(round);
      check(equal(run_greedy<std::int16_t>(weights, num_samples, level), wanted), what + " int16");
      check(equal(run_greedy<std::int32_t>(weights, num_samples, level), wanted), what + " int32");
    }
  }
}

void test_exhaustive_blend(std::size_t rounds) {
  Random random(33);
  for (std::size_t round = 0; round < rounds; ++round) {
    const std::size_t size = round % 20 == 19 ? 34 + random.below(60) : round % 33 + 1;
    std::vector<std::int64_t> sizes(size);
    for (std::int64_t& each : sizes) {
      each = static_cast<std::int64_t>(1 + random.below(round % 3 == 0 ? 1 : round % 3 == 1 ? 3 : 12));
    }
    const Blend wanted = naive_exhaustive(sizes);
    for (const Isa level : levels()) {
      const std::string what = "exhaustive_blend " + name_of(level) + " round " + std::to_string(round);
      check(equal(run_exhaustive<std::int16_t>(sizes, wanted.dataset.size(), level), wanted), what + " int16");
      check(equal(run_exhaustive<std::int32_t>(sizes, wanted.dataset.size(), level), wanted), what + " int32");
    }
  }
}

// ---------------------------------------------------------------- samples

// Computes rows by walking through the stream token by token.
std::vector<std::int64_t> naive_sample_index(const std::vector<std::int32_t>& lengths,
                                             const std::vector<std::int64_t>& visits, std::size_t num_rows,
                                             std::int64_t sequence_length, std::int64_t extra_token) {
  std::vector<std::pair<std::int64_t, std::int64_t>> stream;
  for (std::size_t visit = 0; visit < visits.size(); ++visit) {
    for (std::int64_t at = 0; at < lengths[static_cast<std::size_t>(visits[visit])]; ++at) {
      stream.emplace_back(static_cast<std::int64_t>(visit), at);
    }
  }
  std::vector<std::int64_t> rows{0, 0};
  for (std::size_t row = 1; row < num_rows; ++row) {
    const std::size_t start = row * static_cast<std::size_t>(sequence_length);
    if (extra_token == 1 && start < stream.size()) {  // at the token
      rows.insert(rows.end(), {stream[start].first, stream[start].second});
    } else if (extra_token == 0 && start <= stream.size()) {  // behind the token before it
      rows.insert(rows.end(), {stream[start - 1].first, stream[start - 1].second + 1});
    } else if (extra_token == 1) {  // the stream's last token
      rows.insert(rows.end(), {stream.empty() ? 0 : stream.back().first, stream.empty() ? 0 : stream.back().second});
    } else {  // the end of the last visit, which may be empty
      const auto last = static_cast<std::int64_t>(visits.size()) - 1;
      rows.insert(rows.end(), {std::max<std::int64_t>(last, 0),
                               visits.empty() ? 0 : lengths[static_cast<std::size_t>(visits.back())]});
    }
  }
  return rows;
}

template <class Visit, class Row>
std::vector<std::int64_t> run_sample_index(const std::vector<std::int32_t>& lengths,
                                           const std::vector<std::int64_t>& visits, std::size_t num_rows,
                                           std::int64_t sequence_length, std::int64_t extra_token,
                                           std::int64_t num_threads = 1) {
  const std::vector<Visit> typed(visits.begin(), visits.end());
  std::vector<Row> rows(2 * num_rows, Row{-1});
  trackbed::Poll poll;
  const std::size_t valid =
      trackbed::sample_index<Visit, Row>(std::as_bytes(std::span(lengths)), std::span(std::as_const(typed)),
                                         sequence_length, extra_token, std::span(rows), num_threads, poll);
  check(valid == visits.size(), "sample_index finds every visit valid");
  return {rows.begin(), rows.end()};
}

// The same from pairs, whose documents it checks.
std::vector<std::int64_t> run_cut_pairs(const std::vector<std::int32_t>& lengths,
                                        const std::vector<std::int64_t>& visits, std::size_t num_rows,
                                        std::int64_t sequence_length, std::int64_t extra_token,
                                        std::int64_t num_threads = 1) {
  const std::vector<std::int32_t> typed(visits.begin(), visits.end());
  std::vector<std::int32_t> visited;
  for (const std::int32_t visit : typed) {
    visited.push_back(lengths[static_cast<std::size_t>(visit)]);
  }
  std::vector<std::uint64_t> pairs(typed.size());
  std::vector<std::int32_t> documents(typed.size(), -1);
  std::vector<std::int32_t> rows(2 * num_rows, -1);
  trackbed::Poll poll;
  trackbed::pair_lengths(typed, std::as_bytes(std::span(visited)), pairs, poll);
  check(trackbed::cut_pairs(pairs, documents, sequence_length, extra_token, rows, num_threads, poll) == typed.size(),
        "cut_pairs finds every length valid");
  check(documents == typed, "cut_pairs writes every document");
  return {rows.begin(), rows.end()};
}

void test_sample_index(std::size_t rounds) {
  Random random(44);
  for (std::size_t round = 0; round < rounds; ++round) {
    std::vector<std::int32_t> lengths(1 + random.below(6));
    for (std::int32_t& length : lengths) {
      length = random.below(3) == 0 ? 0 : static_cast<std::int32_t>(random.below(9));
    }
    std::vector<std::int64_t> visits(random.below(12));
    for (std::int64_t& visit : visits) {
      visit = static_cast<std::int64_t>(random.below(lengths.size()));
    }
    const auto sequence_length = static_cast<std::int64_t>(1 + random.below(7));
    const auto extra_token = static_cast<std::int64_t>(random.below(2));
    const std::size_t num_rows = 1 + random.below(20);
    const auto wanted = naive_sample_index(lengths, visits, num_rows, sequence_length, extra_token);
    const std::string what = "sample_index round " + std::to_string(round);
    check(
        run_sample_index<std::int32_t, std::int32_t>(lengths, visits, num_rows, sequence_length, extra_token) == wanted,
        what + " int32, int32");
    check(
        run_sample_index<std::int32_t, std::int64_t>(lengths, visits, num_rows, sequence_length, extra_token) == wanted,
        what + " int32, int64");
    check(
        run_sample_index<std::int64_t, std::int64_t>(lengths, visits, num_rows, sequence_length, extra_token) == wanted,
        what + " int64, int64");
    check(run_cut_pairs(lengths, visits, num_rows, sequence_length, extra_token) == wanted, what + " pairs");
  }
}

// More tokens than 32 bits count, in two documents.
void test_sample_index_counts_in_64_bits() {
  const std::vector<std::int32_t> lengths{2147483647, 2147483647};
  const std::vector<std::int64_t> visits{0, 1, 0};
  const std::vector<std::int64_t> wanted{0, 0, 0, 2000000000, 1, 1852516353, 2, 1705032706};
  check(run_sample_index<std::int32_t, std::int32_t>(lengths, visits, 4, 2000000000, 1) == wanted,
        "sample_index counts tokens in 64 bits");
}

// ---------------------------------------------------------------- narrowing

template <class Source, class Target>
bool survives(Source value) {
  const auto stored = static_cast<Target>(value);
  return static_cast<Source>(stored) == value && (stored < Target{0}) == (value < Source{0});
}

template <class Source, class Target>
std::vector<Source> make_tokens(Random& random, std::size_t round) {
  std::vector<Source> tokens(round % 41);
  for (Source& token : tokens) {
    // Fits every target type, so that only values inserted below do not fit.
    token = static_cast<Source>(random.below(128));
  }
  const std::size_t wrong = round % 3;
  for (std::size_t i = 0; i < wrong && !tokens.empty(); ++i) {
    Source& token = tokens[random.below(tokens.size())];
    switch (random.below(6)) {
      case 0:
        token = std::numeric_limits<Source>::max();
        break;
      case 1:
        token = std::numeric_limits<Source>::min();
        break;
      case 2:
        token = static_cast<Source>(std::numeric_limits<Target>::max());
        break;
      case 3:
        token = static_cast<Source>(static_cast<std::uint64_t>(std::numeric_limits<Target>::max()) + 1);
        break;
      case 4:
        token = static_cast<Source>(static_cast<std::uint64_t>(std::numeric_limits<Target>::min()) - 1);
        break;
      default:
        token = static_cast<Source>(random.next());
    }
  }
  return tokens;
}

template <class Source, class Target>
void test_narrow_from_to(std::size_t rounds) {
  Random random(55 + 16 * sizeof(Source) + sizeof(Target));
  for (std::size_t round = 0; round < rounds; ++round) {
    const std::vector<Source> tokens = make_tokens<Source, Target>(random, round);
    std::size_t wanted = 0;
    while (wanted < tokens.size() && survives<Source, Target>(tokens[wanted])) {
      ++wanted;
    }
    std::vector<Target> stored(tokens.size(), Target{1});
    const std::size_t found = trackbed::narrow<Source, Target>(tokens, stored);
    bool same = found == wanted;
    for (std::size_t i = 0; i < wanted; ++i) {
      same = same && static_cast<Source>(stored[i]) == tokens[i];
    }
    check(same, "narrow " + std::to_string(sizeof(Source)) + " to " + std::to_string(sizeof(Target)) +
                    " bytes, round " + std::to_string(round) + ": " + std::to_string(wanted) + ", found " +
                    std::to_string(found));
  }
}

template <class Source>
void test_narrow_from(std::size_t rounds) {
  test_narrow_from_to<Source, std::uint8_t>(rounds);
  test_narrow_from_to<Source, std::int8_t>(rounds);
  test_narrow_from_to<Source, std::uint16_t>(rounds);
  test_narrow_from_to<Source, std::int16_t>(rounds);
  test_narrow_from_to<Source, std::int32_t>(rounds);
  test_narrow_from_to<Source, std::int64_t>(rounds);
}

void test_narrow(std::size_t rounds) {
  test_narrow_from<std::int8_t>(rounds);
  test_narrow_from<std::uint8_t>(rounds);
  test_narrow_from<std::int16_t>(rounds);
  test_narrow_from<std::uint16_t>(rounds);
  test_narrow_from<std::int32_t>(rounds);
  test_narrow_from<std::uint32_t>(rounds);
  test_narrow_from<std::int64_t>(rounds);
  test_narrow_from<std::uint64_t>(rounds);
}

// ---------------------------------------------------------------- samples of whole sentences

// Rows by the rules, one after the other, and then shuffled from the end.
std::vector<std::uint32_t> naive_mapping(const std::vector<std::int64_t>& borders,
                                         const std::vector<std::int32_t>& lengths,
                                         const trackbed::MappingRules& rules) {
  std::mt19937 draw(static_cast<std::uint32_t>(rules.seed));
  const auto next_target = [&]() -> std::int64_t {
    if (rules.ratio == 0) {
      return rules.max_length;
    }
    const auto drawn = static_cast<std::int64_t>(draw());
    return drawn % rules.ratio == 0 ? 2 + drawn % (rules.max_length - 1) : rules.max_length;
  };
  std::vector<std::array<std::int64_t, 3>> rows;
  for (std::int64_t epoch = 0; epoch < rules.num_epochs && rows.size() < rules.num_samples; ++epoch) {
    for (std::size_t document = 0; document + 1 < borders.size(); ++document) {
      const std::int64_t stop = borders[document + 1];
      const std::int64_t count = stop - borders[document];
      const bool is_long = std::any_of(lengths.begin() + borders[document], lengths.begin() + stop,
                                       [](std::int32_t length) { return length > 512; });
      if (count < rules.min_sentences || (count > 1 && is_long)) {
        continue;
      }
      std::array<std::int64_t, 3> row{borders[document], borders[document], next_target()};
      std::int64_t tokens = 0;
      while (row[1] < stop) {
        tokens += lengths[static_cast<std::size_t>(row[1]++)];
        const bool is_full = tokens >= row[2] && stop - row[1] > 1 && row[1] - row[0] >= rules.min_sentences;
        if (is_full || row[1] == stop) {
          rows.push_back(row);
          row = {row[1], row[1], next_target()};
          tokens = 0;
        }
      }
    }
  }
  std::mt19937_64 shuffle(static_cast<std::uint64_t>(rules.seed) + 1);
  for (std::size_t last = rows.size(); last-- > 1;) {
    std::swap(rows[last], rows[shuffle() % (last + 1)]);
  }
  std::vector<std::uint32_t> numbers;
  for (const auto& row : rows) {
    numbers.insert(numbers.end(), row.begin(), row.end());
  }
  return numbers;
}

void test_mapping(std::size_t rounds) {
  Random random(57);
  for (std::size_t round = 0; round < rounds; ++round) {
    std::vector<std::int64_t> borders{0};
    std::vector<std::int32_t> lengths;
    for (std::uint64_t document = random.below(30); document > 0; --document) {
      for (std::uint64_t sentence = random.below(20); sentence > 0; --sentence) {
        lengths.push_back(static_cast<std::int32_t>(random.below(random.below(16) == 0 ? 520 : 60)));
      }
      borders.push_back(static_cast<std::int64_t>(lengths.size()));
    }
    trackbed::MappingRules rules{.num_epochs = 1 + static_cast<std::int64_t>(random.below(8)),
                                 .num_samples = random.below(500),
                                 .max_length = 2 + static_cast<std::int64_t>(random.below(200)),
                                 .ratio = static_cast<std::int64_t>(random.below(5)),
                                 .seed = static_cast<std::int64_t>(random.below(2147483647)),
                                 .min_sentences = 1 + static_cast<std::int64_t>(random.below(2))};
    std::vector<trackbed::Sentences> documents(borders.size() - 1);
    const auto bytes = std::as_bytes(std::span(lengths));
    trackbed::Poll poll;
    documents.resize(trackbed::find_documents(borders, bytes, rules.min_sentences, documents, poll));
    const std::vector<std::uint32_t> wanted = naive_mapping(borders, lengths, rules);
    const auto narrow = trackbed::build_mapping<std::uint32_t>(documents, bytes, rules, poll);
    const auto wide = trackbed::build_mapping<std::uint64_t>(documents, bytes, rules, poll);
    check(std::equal(wanted.begin(), wanted.end(), narrow.numbers, narrow.numbers + 3 * narrow.num_rows) &&
              std::equal(wanted.begin(), wanted.end(), wide.numbers, wide.numbers + 3 * wide.num_rows),
          "mapping of round " + std::to_string(round));
    std::free(narrow.numbers);
    std::free(wide.numbers);
  }
}

// ---------------------------------------------------------------- counting tokens

void test_count_tokens(std::size_t rounds) {
  Random random(46);
  for (std::size_t round = 0; round < rounds; ++round) {
    const std::size_t offset = random.below(8);
    std::vector<std::byte> bytes(offset + 4 * random.below(300));
    for (std::byte& byte : bytes) {
      byte = static_cast<std::byte>(random.below(256));
    }
    const std::span<const std::byte> lengths = std::span(bytes).subspan(offset);
    std::int64_t tokens = 0;
    std::int32_t shortest = lengths.empty() ? 0 : std::numeric_limits<std::int32_t>::max();
    for (std::size_t at = 0; at < lengths.size(); at += 4) {
      std::int32_t length;
      std::memcpy(&length, lengths.data() + at, 4);
      tokens += length;
      shortest = std::min(shortest, length);
    }
    const trackbed::TokenCount found = trackbed::count_tokens(lengths);
    check(found.tokens == tokens && found.shortest == shortest, "tokens of " + std::to_string(lengths.size() / 4));
  }
}

// What the kernels of its parts make of each dataset.
void test_small_indices(std::size_t rounds) {
  Random random(47);
  for (std::size_t round = 0; round < rounds; ++round) {
    std::vector<trackbed::SmallDataset> datasets(random.below(4));
    std::vector<std::vector<std::int32_t>> lengths(datasets.size());
    std::vector<std::span<const std::byte>> raw;
    std::int64_t room = 0;
    for (std::size_t number = 0; number < datasets.size(); ++number) {
      trackbed::SmallDataset& dataset = datasets[number];
      dataset = {.first = static_cast<std::int64_t>(random.below(4)),
                 .num_documents = static_cast<std::int64_t>(random.below(20)),
                 .num_epochs = static_cast<std::int64_t>(1 + random.below(3)),
                 .num_samples = static_cast<std::int64_t>(random.below(30)),
                 .samples_before_last = -1,
                 .sequence_length = static_cast<std::int64_t>(1 + random.below(9)),
                 .extra_token = static_cast<std::int64_t>(random.below(2)),
                 .seed = static_cast<std::int64_t>(random.below(1000))};
      if (dataset.num_epochs > 1 && random.below(2) == 0) {
        dataset.samples_before_last = dataset.num_samples / 2;
      }
      lengths[number].resize(static_cast<std::size_t>(dataset.num_documents));
      for (std::int32_t& length : lengths[number]) {
        length = static_cast<std::int32_t>(random.below(12));
      }
      raw.push_back(std::as_bytes(std::span<const std::int32_t>(lengths[number])));
      room += trackbed::room_of(dataset);
    }
    std::vector<std::uint32_t> indices(static_cast<std::size_t>(room), 0xffffffff);
    trackbed::Poll poll;
    check(trackbed::small_indices(datasets, raw, indices, Isa::baseline, poll) == datasets.size(), "small_indices");
    auto rest = std::span<const std::uint32_t>(indices);
    for (std::size_t number = 0; number < datasets.size(); ++number) {
      const trackbed::SmallDataset& dataset = datasets[number];
      const auto num_visits = static_cast<std::size_t>(dataset.num_epochs * dataset.num_documents);
      const auto num_rows = static_cast<std::size_t>(dataset.num_samples) + 1;
      std::vector<std::int64_t> visits(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(num_visits));
      for (std::int64_t& visit : visits) {
        visit -= dataset.first;
      }
      const auto found = rest.subspan(num_visits, 2 * num_rows);
      const auto wanted =
          naive_sample_index(lengths[number], visits, num_rows, dataset.sequence_length, dataset.extra_token);
      check(std::vector<std::int64_t>(found.begin(), found.end()) == wanted, "small_indices rows");
      std::vector<std::uint32_t> order(rest.begin() + static_cast<std::ptrdiff_t>(num_visits + 2 * num_rows),
                                       rest.begin() + trackbed::room_of(dataset));
      std::sort(order.begin(), order.end());
      for (std::size_t sample = 0; sample < order.size(); ++sample) {
        check(order[sample] == sample, "small_indices order");
      }
      std::sort(visits.begin(), visits.end());
      for (std::size_t visit = 0; visit < visits.size(); ++visit) {
        const auto document = static_cast<std::int64_t>(visit) / dataset.num_epochs;
        check(visits[visit] == document, "small_indices visits");
      }
      rest = rest.subspan(static_cast<std::size_t>(trackbed::room_of(dataset)));
    }
  }
  const trackbed::SmallDataset beyond{0, 3, 1, 1, -1, 4, 1, 1};
  const std::vector<std::int32_t> two{4, 4};
  const std::vector<std::span<const std::byte>> raw{std::as_bytes(std::span<const std::int32_t>(two))};
  std::vector<std::uint32_t> indices(static_cast<std::size_t>(trackbed::room_of(beyond)));
  trackbed::Poll poll;
  check(trackbed::small_indices({&beyond, 1}, raw, indices, Isa::baseline, poll) == 0, "small_indices beyond the file");
}

// Many chunks of visits on several threads; and an invalid visit at any position.
void test_sample_index_in_threads(std::size_t num_visits) {
  Random random(45);
  std::vector<std::int32_t> lengths(1000);
  for (std::int32_t& length : lengths) {
    length = random.below(4) == 0 ? 0 : static_cast<std::int32_t>(random.below(30));
  }
  std::vector<std::int64_t> visits(num_visits);
  std::int64_t total = 0;
  for (std::int64_t& visit : visits) {
    visit = static_cast<std::int64_t>(random.below(lengths.size()));
    total += lengths[static_cast<std::size_t>(visit)];
  }
  for (const std::int64_t extra_token : {0, 1}) {
    const auto num_rows = static_cast<std::size_t>(total / 24) + 9;
    const auto wanted = naive_sample_index(lengths, visits, num_rows, 24, extra_token);
    for (const std::int64_t threads : {1, 2, 3, 7}) {
      check(run_sample_index<std::int32_t, std::int32_t>(lengths, visits, num_rows, 24, extra_token, threads) == wanted,
            "sample_index in " + std::to_string(threads) + " threads");
      check(run_cut_pairs(lengths, visits, num_rows, 24, extra_token, threads) == wanted,
            "cut_pairs in " + std::to_string(threads) + " threads");
    }
  }
  for (const std::size_t wrong : {std::size_t{0}, num_visits / 2, num_visits - 1}) {
    std::vector<std::int32_t> typed(visits.begin(), visits.end());
    typed[wrong] = wrong % 2 == 0 ? 1000 : -1;
    std::vector<std::int32_t> rows(2 * static_cast<std::size_t>(total / 24));
    trackbed::Poll poll;
    check(trackbed::sample_index<std::int32_t, std::int32_t>(std::as_bytes(std::span(lengths)),
                                                             std::span(std::as_const(typed)), 24, 1, std::span(rows), 3,
                                                             poll) == wrong,
          "sample_index names visit " + std::to_string(wrong));
    std::vector<std::uint64_t> pairs(num_visits, std::uint64_t{20} << 32);
    pairs[wrong] |= std::uint64_t{1} << 63;
    std::vector<std::int32_t> documents(num_visits);
    check(trackbed::cut_pairs(pairs, documents, 24, 1, rows, 3, poll) == wrong,
          "cut_pairs names visit " + std::to_string(wrong));
  }
}

// ---------------------------------------------------------------- blend loops

void test_sieve(std::size_t rounds) {
  Random random(88);
  constexpr std::size_t kPadding = trackbed::BlendLoops::kPadding;
  const double never = std::numeric_limits<double>::infinity();
  for (std::size_t round = 0; round < rounds; ++round) {
    const std::size_t size = size_of_round(random, round);
    std::vector<double> weights = make_weights(random, size, Weights::random);
    std::vector<double> counts(size);
    const double step = static_cast<double>(1 + random.below(1000));
    for (std::size_t d = 0; d < size; ++d) {
      counts[d] = random.below(9) == 0 ? never : std::floor(weights[d] * step) + static_cast<double>(random.below(2));
    }
    weights.resize(size + kPadding, 0.0);
    counts.resize(size + kPadding, never);
    const double threshold = random.unit() - 0.5;
    std::vector<std::int32_t> wanted;
    for (std::size_t d = 0; d < size; ++d) {
      if (rounded_product(weights[d], step) - counts[d] >= threshold) {
        wanted.push_back(static_cast<std::int32_t>(d));
      }
    }
    for (const Isa level : levels()) {
      std::vector<double> found_weights(size + kPadding);
      std::vector<double> found_counts(size + kPadding);
      std::vector<std::int32_t> at(size + kPadding);
      const std::size_t found = trackbed::blend_loops_at(level).sieve(
          weights.data(), counts.data(), size, step, threshold, found_weights.data(), found_counts.data(), at.data());
      bool right = found == wanted.size() && std::equal(wanted.begin(), wanted.end(), at.begin());
      for (std::size_t k = 0; right && k < found + kPadding; ++k) {
        const auto d = k < found ? static_cast<std::size_t>(wanted[k]) : size;
        right = found_weights[k] == weights[d] && found_counts[k] == counts[d];
      }
      check(right, "sieve " + name_of(level) + " round " + std::to_string(round));
    }
  }
}

void test_draw(std::size_t rounds) {
  Random random(99);
  constexpr std::size_t kPadding = trackbed::BlendLoops::kPadding;
  for (std::size_t round = 0; round < rounds; ++round) {
    const std::size_t size = 1 + round % 60;
    const auto kind = round % 2 == 0 ? Weights::random : Weights::dyadic;
    std::vector<double> weights = make_weights(random, size, kind);
    std::vector<double> counts(size);
    for (double& count : counts) {
      count = static_cast<double>(random.below(3));
    }
    const double step = static_cast<double>(1 + random.below(10));
    const double threshold = random.below(2) == 0 ? -1e300 : random.unit() - 1.0;
    std::vector<double> wanted_counts = counts;
    std::vector<std::uint32_t> wanted;
    double wanted_lowest = 1e9;
    for (std::size_t k = 0; k < 20; ++k) {
      const std::size_t best = naive_largest_error(weights, wanted_counts, step + static_cast<double>(k));
      const double error = rounded_product(weights[best], step + static_cast<double>(k)) - wanted_counts[best];
      if (error < threshold) {
        break;
      }
      wanted.push_back(static_cast<std::uint32_t>(best));
      wanted_counts[best] += 1.0;
      wanted_lowest = std::min(wanted_lowest, error);
    }
    weights.resize(size + kPadding, 0.0);
    counts.resize(size + kPadding, std::numeric_limits<double>::infinity());
    for (const Isa level : levels()) {
      std::vector<double> found_counts = counts;
      std::uint32_t drawn[20];
      double lowest = 1e9;
      const std::size_t found = trackbed::blend_loops_at(level).draw(weights.data(), found_counts.data(), size, step,
                                                                     20, threshold, drawn, &lowest);
      check(found == wanted.size() && std::equal(wanted.begin(), wanted.end(), drawn) && lowest == wanted_lowest &&
                std::equal(wanted_counts.begin(), wanted_counts.end(), found_counts.begin()),
            "draw " + name_of(level) + " round " + std::to_string(round));
    }
  }
}

// ---------------------------------------------------------------- shuffle

// NumPy seeds its generator like the standard library.
template <class Element>
std::vector<Element> naive_shuffle(std::mt19937& bits, std::size_t size) {
  std::vector<Element> array(size);
  std::iota(array.begin(), array.end(), Element{0});
  for (std::size_t last = size - 1; last > 0 && size > 0; --last) {
    const std::uint64_t mask = ~std::uint64_t{0} >> std::countl_zero(last);
    std::uint64_t target = bits() & mask;
    while (target > last) {
      target = bits() & mask;
    }
    std::swap(array[last], array[target]);
  }
  return array;
}

void test_legacy_shuffle(std::size_t rounds) {
  Random random(101);
  for (std::size_t round = 0; round < rounds; ++round) {
    const auto seed = static_cast<std::uint32_t>(random.next());
    const std::size_t sizes[] = {random.below(40), random.below(5000),
                                 (std::size_t{1} << random.below(12)) + round % 3};
    for (const Isa level : levels()) {
      std::mt19937 bits(seed);
      trackbed::MersenneTwister twister;
      trackbed::seed(twister, seed);
      trackbed::Poll poll;
      for (const std::size_t size : sizes) {  // each continues from the state of the previous one
        const std::vector<std::uint32_t> wanted = naive_shuffle<std::uint32_t>(bits, size);
        std::vector<std::uint32_t> found(size);
        std::iota(found.begin(), found.end(), 0U);
        trackbed::legacy_shuffle<std::uint32_t>(twister, found, level, poll);
        check(found == wanted, "legacy_shuffle " + name_of(level) + " of " + std::to_string(size));
      }
      std::mt19937 again(seed);
      std::vector<std::uint64_t> found(sizes[1]);
      std::iota(found.begin(), found.end(), std::uint64_t{0});
      trackbed::seed(twister, seed);
      trackbed::legacy_shuffle<std::uint64_t>(twister, found, level, poll);
      check(found == naive_shuffle<std::uint64_t>(again, sizes[1]), "legacy_shuffle " + name_of(level) + " 64 bits");
    }
  }
}

// Bounds of more than 32 bits, for which an array would not fit into memory.
void test_wide_draws() {
  for (const Isa level : levels()) {
    std::mt19937 bits(5);
    trackbed::MersenneTwister twister;
    trackbed::seed(twister, 5);
    std::uint64_t found[1000];
    const std::uint64_t last = (std::uint64_t{1} << 33) + 500;
    trackbed::target_draws_at(level).wide(twister, last, found, 1000);
    bool right = true;
    for (std::size_t k = 0; k < 1000; ++k) {
      const std::uint64_t mask = ~std::uint64_t{0} >> std::countl_zero(last - k);
      std::uint64_t target;
      do {
        const std::uint64_t high = bits();
        target = (high << 32 | bits()) & mask;
      } while (target > last - k);
      right = right && found[k] == target;
    }
    check(right, "wide draws " + name_of(level));
  }
}

// ---------------------------------------------------------------- permutation

// Computed by division and remainder, with a multiplication of 32-bit halves.
std::uint64_t naive_permute(std::uint64_t size, std::uint64_t key, std::uint64_t rounds, std::uint64_t position) {
  const auto mix = [](std::uint64_t bits) {
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
    return bits ^ bits >> 31;
  };
  const auto moved = [](std::uint64_t from, std::uint64_t by, std::uint64_t its_key, std::uint64_t bound) {
    std::uint64_t bits = by * 0x9e3779b97f4a7c15 + its_key;
    bits = (bits ^ bits >> 32) * 0xd6e8feb86659fd93;
    return (from + (((bits >> 32) * bound + ((bits & 0xffffffff) * bound >> 32)) >> 32)) % bound;
  };
  std::uint64_t rows = static_cast<std::uint64_t>(std::sqrt(static_cast<double>(size)));
  rows -= rows > 2 ? 2 : 0;
  while (rows * rows < size || (rows % 2 == 1 && size > 1)) {
    ++rows;
  }
  const std::uint64_t columns = (size + rows - 1) / rows;
  const std::uint64_t mixed = mix(mix(size + 0x9e3779b97f4a7c15) ^ key);
  do {
    std::uint64_t row = position / columns;
    std::uint64_t column = position % columns;
    for (std::uint64_t round = 0; round < rounds; ++round) {
      const std::uint64_t its_key = mixed + round * 0xbf58476d1ce4e5b9;
      if (round % 2 == 0) {
        row = moved(row, column, its_key, rows);
      } else {
        column = moved(column, row, its_key, columns);
      }
    }
    position = row * columns + column;
  } while (position >= size);
  return position;
}

std::uint64_t size_of_permutation(Random& random, std::size_t round) {
  switch (round % 4) {
    case 0:
      return 1 + random.below(200);
    case 1:
      return 1 + random.below(5000);
    case 2:
      return (std::uint64_t{1} << random.below(63)) + random.below(3) - (round % 8 == 2 ? 0 : 1) + 1;
    default:
      return 1 + (random.next() >> (1 + random.below(40)));
  }
}

std::vector<std::int64_t> make_positions(Random& random, std::uint64_t size, std::size_t count) {
  std::vector<std::int64_t> positions(count);
  for (std::int64_t& position : positions) {
    position = static_cast<std::int64_t>(random.next() % size);
  }
  return positions;
}

std::vector<std::int64_t> run_permute(std::uint64_t size, std::uint64_t key, const std::vector<std::int64_t>& positions,
                                      Isa level, int num_threads = 1) {
  std::vector<std::int64_t> images(positions.size(), -1);
  trackbed::Poll poll;
  trackbed::permute(trackbed::make_permutation(size, key), positions, images, level, num_threads, poll);
  return images;
}

void test_permutation(std::size_t rounds) {
  Random random(88);
  for (std::size_t round = 0; round < rounds; ++round) {
    const std::uint64_t size = round == 0 ? (std::uint64_t{1} << 63) - 1 : size_of_permutation(random, round);
    const std::uint64_t key = random.next();
    const trackbed::Permutation permutation = trackbed::make_permutation(size, key);
    const std::vector<std::int64_t> positions = make_positions(random, size, random.below(150));
    std::vector<std::int64_t> wanted;
    bool same = true;
    bool back = true;
    for (const std::int64_t position : positions) {
      const auto start = static_cast<std::uint64_t>(position);
      const std::uint64_t image = naive_permute(size, key, permutation.rounds, start);
      wanted.push_back(static_cast<std::int64_t>(image));
      same = same && trackbed::permute(permutation, start) == image;
      back = back && trackbed::find_position(permutation, image) == start;
    }
    const std::string what = "permute [0, " + std::to_string(size) + ")";
    check(same, what + " one by one");
    check(back, what + " and back");
    for (const Isa level : levels()) {
      check(run_permute(size, key, positions, level) == wanted, what + " " + name_of(level));
    }
  }
}

// Permutes the blocks, then the samples of each window.
std::vector<std::int64_t> naive_blocks(std::uint64_t size, std::uint64_t key, std::uint64_t block,
                                       std::uint64_t window) {
  const std::uint64_t num_blocks = (size + block - 1) / block;
  const trackbed::Permutation blocks = trackbed::make_permutation(num_blocks, key);
  const std::uint64_t window_key = trackbed::with_key(blocks, ~key).key;
  std::vector<std::int64_t> images;
  for (std::uint64_t first = 0; first < num_blocks; first += window) {
    std::vector<std::int64_t> inside;
    for (std::uint64_t slot = first; slot < std::min(first + window, num_blocks); ++slot) {
      const std::uint64_t start = trackbed::permute(blocks, slot) * block;
      for (std::uint64_t sample = start; sample < std::min(start + block, size); ++sample) {
        inside.push_back(static_cast<std::int64_t>(sample));
      }
    }
    const trackbed::Permutation order = trackbed::make_permutation(inside.size(), window_key + first / window);
    for (std::uint64_t at = 0; at < inside.size(); ++at) {
      images.push_back(inside[block == 1 ? at : trackbed::permute(order, at)]);
    }
  }
  return images;
}

void test_block_permutation(std::size_t rounds) {
  Random random(99);
  for (std::size_t round = 0; round < rounds; ++round) {
    const std::uint64_t size = 1 + random.below(round % 10 == 0 ? 3000 : 100);
    const std::uint64_t key = random.next();
    const std::uint64_t block = 1 + random.below(round % 3 == 0 ? size + 2 : 12);
    const std::uint64_t window = 1 + random.below(round % 5 == 0 ? 100 : 6);
    const std::vector<std::int64_t> wanted = naive_blocks(size, key, block, window);
    const trackbed::BlockPermutation permutation = trackbed::make_block_permutation(size, key, block, window);
    std::vector<std::int64_t> positions(size);
    bool same = true;
    for (std::uint64_t position = 0; position < size; ++position) {
      positions[position] = static_cast<std::int64_t>(position);
      const std::uint64_t image = trackbed::permute(permutation, position);
      same = same && image == static_cast<std::uint64_t>(wanted[position]);
    }
    const std::string what = "permute [0, " + std::to_string(size) + ") in blocks of " + std::to_string(block) +
                             ", windows of " + std::to_string(window);
    check(same, what + " one by one");
    for (const Isa level : levels()) {
      std::vector<std::int64_t> images(size, -1);
      trackbed::Poll poll;
      trackbed::permute(permutation, positions, images, level, 2, poll);
      check(images == wanted, what + " " + name_of(level));
    }
  }
}

// More positions than one task has, and sizes below and above the largest size with a table.
void test_permutation_of_many_positions() {
  Random random(111);
  for (const std::uint64_t size : {std::uint64_t{3}, std::uint64_t{1000}, std::uint64_t{1} << 40}) {
    const std::vector<std::int64_t> positions = make_positions(random, size, 140000);
    const trackbed::Permutation permutation = trackbed::make_permutation(size, 5);
    std::vector<std::int64_t> wanted;
    for (const std::int64_t position : positions) {
      const std::uint64_t image = trackbed::permute(permutation, static_cast<std::uint64_t>(position));
      wanted.push_back(static_cast<std::int64_t>(image));
    }
    for (const Isa level : levels()) {
      check(run_permute(size, 5, positions, level, 3) == wanted, "permute many, " + name_of(level));
    }
  }
}

// ---------------------------------------------------------------- the instant order

__extension__ typedef unsigned __int128 Product;

// Random stages of a blend, with trees of any shape over some of the datasets, and any shares and phases.
struct MadeTrees {
  std::size_t num_datasets;
  std::vector<trackbed::InterleavingNode> nodes;
  std::vector<std::int64_t> first_samples;
  std::vector<std::int64_t> first_nodes;
  std::vector<std::uint32_t> roots;

  std::vector<std::int64_t> ramps;
  std::vector<std::uint32_t> parents;

  trackbed::BlendTrees spans() const { return {nodes, first_samples, first_nodes, roots, ramps, parents}; }
  std::span<const trackbed::InterleavingNode> block(std::size_t stage) const {
    const auto start = static_cast<std::size_t>(first_nodes[stage]);
    const auto stop = stage + 1 < roots.size() ? static_cast<std::size_t>(first_nodes[stage + 1]) : nodes.size();
    return std::span(nodes).subspan(start, stop - start);
  }
};

MadeTrees make_trees(Random& random, std::size_t num_datasets, std::size_t num_stages, std::size_t most_samples) {
  MadeTrees trees{num_datasets, {}, {}, {}, {}, {}, {}};
  std::int64_t first_sample = 0;
  for (std::size_t stage = 0; stage < num_stages; ++stage) {
    trees.first_samples.push_back(first_sample);
    trees.first_nodes.push_back(static_cast<std::int64_t>(trees.nodes.size()));
    first_sample += static_cast<std::int64_t>(random.below(most_samples));
    std::vector<std::uint32_t> without_parent;
    for (std::uint32_t dataset = 0; dataset < num_datasets; ++dataset) {
      trees.nodes.push_back({0, random.below(1000), 0, dataset});
      if (dataset == 0 || random.below(5) > 0) {
        without_parent.push_back(dataset);
      }
    }
    for (auto node = static_cast<std::uint32_t>(num_datasets); without_parent.size() > 1; ++node) {
      std::swap(without_parent[random.below(without_parent.size())], without_parent.back());
      const std::uint32_t left = without_parent.back();
      without_parent.pop_back();
      std::uint32_t& right = without_parent[random.below(without_parent.size())];
      const std::uint64_t share =
          random.below(10) == 0 ? (random.below(2) == 0 ? 1 : ~std::uint64_t{0}) : random.next();
      trees.nodes.push_back({share > 0 ? share : 1, random.next(), left, right});
      right = node;
    }
    trees.roots.push_back(without_parent[0]);
    trees.ramps.push_back(0);
  }
  return trees;
}

struct Located {
  std::vector<std::int32_t> datasets;
  std::vector<std::int64_t> draws;
  std::vector<std::int64_t> samples;
};

// Draws a stage from its beginning; every node counts the draws that it has passed on.
Located naive_interleaving(std::span<const trackbed::InterleavingNode> nodes, std::uint32_t root, std::size_t draws) {
  std::vector<std::uint64_t> sent(nodes.size(), 0);
  Located located;
  for (std::size_t draw = 0; draw < draws; ++draw) {
    std::uint32_t at = root;
    while (nodes[at].share != 0) {
      const trackbed::InterleavingNode& node = nodes[at];
      const std::uint64_t number = sent[at]++;
      const Product before = Product{node.share} * number + node.phase;
      const Product after = Product{node.share} * (number + 1) + node.phase;
      at = static_cast<std::uint64_t>(after >> 64) > static_cast<std::uint64_t>(before >> 64) ? node.left : node.right;
    }
    located.datasets.push_back(static_cast<std::int32_t>(at));
    located.draws.push_back(static_cast<std::int64_t>(nodes[at].phase + sent[at]++));
  }
  return located;
}

Located run_locate(const MadeTrees& trees, const std::vector<trackbed::Permutation>& permutations,
                   const std::vector<std::uint64_t>& keys, const std::vector<std::int64_t>& positions,
                   std::uint64_t block = 1, std::uint64_t window = 1, int num_threads = 1) {
  const std::size_t size = positions.size();
  Located located{std::vector<std::int32_t>(size), std::vector<std::int64_t>(size), std::vector<std::int64_t>(size)};
  trackbed::Poll poll;
  trackbed::instant_locate(trees.spans(), {permutations, keys, block, window}, positions, located.datasets,
                           located.draws, located.samples, num_threads, poll);
  return located;
}

std::vector<trackbed::Permutation> make_permutations(Random& random, std::size_t count) {
  std::vector<trackbed::Permutation> permutations;
  for (std::size_t dataset = 0; dataset < count; ++dataset) {
    const std::uint64_t size = 1 + random.below(random.below(3) == 0 ? 5 : 2000);
    permutations.push_back(trackbed::make_permutation(size, random.next()));
  }
  return permutations;
}

std::vector<std::uint64_t> make_keys(Random& random, std::size_t count) {
  std::vector<std::uint64_t> keys(count);
  for (std::uint64_t& key : keys) {
    key = random.next();
  }
  return keys;
}

// Bands by long division, from the root down: the band of a node is the narrowest of all leaves below it.
std::uint64_t naive_band(const std::vector<trackbed::InterleavingNode>& nodes, std::size_t at, std::uint64_t reach) {
  if (nodes[at].share == 0) {
    const std::uint64_t most = std::uint64_t{15} << 29;
    const std::uint64_t half = reach / 2 + reach % 2;
    const auto band = half < most ? static_cast<std::uint64_t>((Product{most - half} << 32) / reach) : 0;
    return std::min(std::uint64_t{1} << 31, band);
  }
  const auto below = [&](std::uint64_t share) {
    const Product product = Product{reach} * share;
    const bool exact = static_cast<std::uint64_t>(product) == 0;
    return (std::uint64_t{1} << 32) + static_cast<std::uint64_t>(product >> 64) + (exact ? 0 : 1);
  };
  const std::uint64_t share = nodes[at].share;
  return std::min(naive_band(nodes, nodes[at].left, below(share)),
                  naive_band(nodes, nodes[at].right, below(0 - share)));
}

std::uint64_t naive_reach(const std::vector<trackbed::InterleavingNode>& nodes, std::size_t root, std::size_t wanted) {
  std::uint64_t reach = 0;
  std::vector<std::pair<std::size_t, std::uint64_t>> waiting{{root, 0}};
  while (!waiting.empty()) {
    const auto [at, its_reach] = waiting.back();
    waiting.pop_back();
    if (at == wanted) {
      reach = its_reach;
    }
    if (nodes[at].share != 0) {
      for (const bool left : {false, true}) {
        const Product product = Product{its_reach} * (left ? nodes[at].share : 0 - nodes[at].share);
        const bool exact = static_cast<std::uint64_t>(product) == 0;
        waiting.push_back({left ? nodes[at].left : nodes[at].right,
                           (std::uint64_t{1} << 32) + static_cast<std::uint64_t>(product >> 64) + (exact ? 0 : 1)});
      }
    }
  }
  return reach;
}

void test_draw_phases(std::size_t rounds) {
  Random random(155);
  for (std::size_t round = 0; round < rounds; ++round) {
    const std::size_t num_datasets = 1 + random.below(round % 10 == 0 ? 200 : 12);
    const MadeTrees trees = make_trees(random, num_datasets, 1, 1);
    std::vector<trackbed::InterleavingNode> nodes = trees.nodes;
    const std::uint64_t key = random.next();
    trackbed::draw_phases(nodes, num_datasets, key);
    bool same = true;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      if (i >= num_datasets) {
        const std::uint64_t band = naive_band(nodes, i, naive_reach(nodes, nodes.size() - 1, i));
        const Product offset = Product{trackbed::split_mix(key, i - num_datasets)} * band >> 31;
        same = same && nodes[i].phase == (std::uint64_t{1} << 63) - (band << 32) + static_cast<std::uint64_t>(offset);
      } else {
        same = same && nodes[i].phase == trees.nodes[i].phase;
      }
    }
    check(same, "draw_phases round " + std::to_string(round));
  }
}

// Compares positions of all stages, in any order, with sequential draws of each stage.
void test_interleaving(std::size_t rounds) {
  Random random(122);
  for (std::size_t round = 0; round < rounds; ++round) {
    const std::size_t num_datasets = 1 + random.below(round % 10 == 0 ? 300 : 12);
    const MadeTrees trees = make_trees(random, num_datasets, 1 + random.below(5), round % 4 == 0 ? 3 : 200);
    const auto stop = trees.first_samples.back() + static_cast<std::int64_t>(1 + random.below(300));
    Located wanted;
    bool counted = true;
    for (std::size_t stage = 0; stage < trees.roots.size(); ++stage) {
      const auto block = trees.block(stage);
      const std::int64_t after = stage + 1 < trees.roots.size() ? trees.first_samples[stage + 1] : stop;
      const std::int64_t length = after - trees.first_samples[stage];
      const Located drawn = naive_interleaving(block, trees.roots[stage], static_cast<std::size_t>(length));
      wanted.datasets.insert(wanted.datasets.end(), drawn.datasets.begin(), drawn.datasets.end());
      wanted.draws.insert(wanted.draws.end(), drawn.draws.begin(), drawn.draws.end());
      std::vector<std::int64_t> counts(num_datasets);
      for (std::size_t dataset = 0; dataset < num_datasets; ++dataset) {
        counts[dataset] = static_cast<std::int64_t>(block[dataset].phase);
      }
      for (const std::int32_t dataset : drawn.datasets) {
        ++counts[static_cast<std::size_t>(dataset)];
      }
      std::vector<std::int64_t> found(num_datasets);
      trackbed::interleaving_counts(block, trees.roots[stage], length, found);
      counted = counted && found == counts;
    }
    const auto permutations = make_permutations(random, num_datasets);
    const auto keys = make_keys(random, num_datasets);
    std::vector<std::int64_t> positions(static_cast<std::size_t>(stop));
    for (std::size_t i = 0; i < positions.size(); ++i) {
      positions[i] = static_cast<std::int64_t>(i);
      std::swap(positions[i], positions[random.below(i + 1)]);
    }
    const Located found = run_locate(trees, permutations, keys, positions);
    bool same = true;
    bool samples = true;
    for (std::size_t i = 0; i < positions.size(); ++i) {
      const auto position = static_cast<std::size_t>(positions[i]);
      same = same && found.datasets[i] == wanted.datasets[position] && found.draws[i] == wanted.draws[position];
      const auto dataset = static_cast<std::size_t>(found.datasets[i]);
      const auto [size, rows, columns, reciprocal, key, its_rounds] = permutations[dataset];
      const auto draw = static_cast<std::uint64_t>(found.draws[i]);
      const std::uint64_t its_key = trackbed::split_mix(keys[dataset], draw / size);
      samples = samples &&
                found.samples[i] == static_cast<std::int64_t>(naive_permute(size, its_key, its_rounds, draw % size));
    }
    const std::string what = "instant order round " + std::to_string(round);
    check(counted, what + " counts");
    check(same, what + " datasets and draws");
    check(samples, what + " samples");
  }
}

// Compares a ramp, in any order of its positions, with sequential draws of its two trees.
void test_ramps(std::size_t rounds) {
  Random random(144);
  for (std::size_t round = 0; round < rounds; ++round) {
    const std::size_t num_datasets = 1 + random.below(round % 10 == 0 ? 300 : 12);
    MadeTrees trees = make_trees(random, num_datasets, 2, 1);
    const std::size_t length = 1 + random.below(400);
    trees.ramps[1] = static_cast<std::int64_t>(length);
    trees.parents.assign(trees.nodes.size(), trackbed::kNoParent);
    std::vector<std::int64_t> counts(num_datasets);
    Located drawn[2];
    for (std::size_t stage = 0; stage < 2; ++stage) {
      const auto block = trees.block(stage);
      for (std::size_t node = num_datasets; node < block.size(); ++node) {
        for (const std::uint32_t child : {block[node].left, block[node].right}) {
          trees.parents[static_cast<std::size_t>(trees.first_nodes[stage]) + child] = static_cast<std::uint32_t>(node);
        }
      }
      for (std::size_t dataset = 0; dataset < num_datasets; ++dataset) {
        counts[dataset] += static_cast<std::int64_t>(block[dataset].phase);
      }
      drawn[stage] = naive_interleaving(block, trees.roots[stage], length);
    }
    std::vector<std::int64_t> positions(length);
    for (std::size_t i = 0; i < length; ++i) {
      positions[i] = static_cast<std::int64_t>(length - 1 - i);
    }
    const Located found =
        run_locate(trees, make_permutations(random, num_datasets), make_keys(random, num_datasets), positions);
    bool same = true;
    std::size_t numbers[2] = {0, 0};
    for (std::size_t k = 0; k < length; ++k) {
      const auto after = static_cast<std::size_t>(trackbed::ramp_count(k + 1, length));
      const std::size_t tree = after > numbers[1] ? 1 : 0;
      const std::int32_t dataset = drawn[tree].datasets[numbers[tree]++];
      same = same && found.datasets[length - 1 - k] == dataset &&
             found.draws[length - 1 - k] == counts[static_cast<std::size_t>(dataset)]++;
    }
    check(same && numbers[1] == (length + 1) / 2, "ramp round " + std::to_string(round));
  }
}

void test_instant_order_in_blocks(std::size_t rounds) {
  Random random(133);
  for (std::size_t round = 0; round < rounds; ++round) {
    const std::size_t num_datasets = 1 + random.below(6);
    const MadeTrees trees = make_trees(random, num_datasets, 2, 500);
    const auto permutations = make_permutations(random, num_datasets);
    const auto keys = make_keys(random, num_datasets);
    const std::uint64_t block = 2 + random.below(40);
    const std::uint64_t window = 1 + random.below(6);
    const Located found = run_locate(trees, permutations, keys, make_positions(random, 3000, 100), block, window);
    bool same = true;
    for (std::size_t i = 0; i < found.datasets.size(); ++i) {
      const auto dataset = static_cast<std::size_t>(found.datasets[i]);
      const std::uint64_t size = permutations[dataset].size;
      const auto draw = static_cast<std::uint64_t>(found.draws[i]);
      const auto wanted = naive_blocks(size, trackbed::split_mix(keys[dataset], draw / size), block, window);
      same = same && found.samples[i] == wanted[draw % size];
    }
    check(same, "instant order in blocks, round " + std::to_string(round));
  }
}

// More positions than one task has, up to the last valid one.
void test_instant_order_on_threads() {
  Random random(144);
  const MadeTrees trees = make_trees(random, 100, 3, 1000);
  const auto permutations = make_permutations(random, 100);
  const auto keys = make_keys(random, 100);
  std::vector<std::int64_t> positions(70001);
  for (std::int64_t& position : positions) {
    position = static_cast<std::int64_t>(random.next() >> (1 + random.below(63)));
  }
  positions[5] = std::numeric_limits<std::int64_t>::max() - 1000;  // each leaf has up to 1000 earlier draws
  const Located alone = run_locate(trees, permutations, keys, positions);
  for (const int num_threads : {2, 5}) {
    const Located found = run_locate(trees, permutations, keys, positions, 1, 1, num_threads);
    check(found.datasets == alone.datasets && found.draws == alone.draws && found.samples == alone.samples,
          "instant order on " + std::to_string(num_threads) + " threads");
  }
}

// ---------------------------------------------------------------- threads

void test_run_parallel() {
  for (const int threads : {1, 2, 5}) {
    std::vector<int> done(1000, 0);
    trackbed::Poll poll;
    trackbed::run_parallel(1000, threads, poll, 1, [&](std::int64_t task) { ++done[static_cast<std::size_t>(task)]; });
    check(done == std::vector<int>(1000, 1), "run_parallel calls every task once");
    bool thrown = false;
    try {
      trackbed::run_parallel(1000, threads, poll, 1, [&](std::int64_t task) {
        if (task == 500) {
          throw 500;
        }
      });
    } catch (int number) {
      thrown = number == 500;
    }
    check(thrown, "run_parallel throws what a task threw");
    const auto started = std::chrono::steady_clock::now();
    trackbed::Poll stopping([](std::int64_t) { throw 20; });
    thrown = false;
    try {
      trackbed::run_parallel(1000000, threads, stopping, 1,
                             [](std::int64_t) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); });
    } catch (int number) {
      thrown = number == 20;
    }
    check(thrown && std::chrono::steady_clock::now() - started < std::chrono::seconds(20), "a poll ends run_parallel");
    // All leading tasks that a poll reports are done, even if a thread is slow.
    std::vector<std::atomic<int>> finished(200);
    bool all_done = true;
    trackbed::Poll looking([&](std::int64_t ready) {
      for (std::int64_t task = 0; task < ready; ++task) {
        all_done = all_done && finished[static_cast<std::size_t>(task)] == 1;
      }
    });
    trackbed::run_parallel(200, threads, looking, 1, [&](std::int64_t task) {
      std::this_thread::sleep_for(std::chrono::milliseconds(task % 7 == 0 ? 3 : 0));
      finished[static_cast<std::size_t>(task)] = 1;
    });
    check(all_done, "a poll hears of finished tasks only");
  }
}

// ---------------------------------------------------------------- batches

// A dataset of a few files, in buffers without slack, so that sanitizers detect reads outside of them.
struct MadeFiles {
  std::int64_t dtype = 8;
  std::int64_t token_bytes = 2;
  std::vector<std::vector<std::byte>> tokens;
  std::vector<std::vector<std::byte>> lengths;   // unaligned
  std::vector<std::vector<std::byte>> pointers;  // unaligned
  std::vector<trackbed::TokenFile> files;
  std::vector<std::vector<std::int64_t>> sequences;  // tokens of all files as int64
  std::vector<std::int64_t> visits;
  std::vector<std::int64_t> rows;
  std::vector<std::uint32_t> shuffle;
  trackbed::SampleSource source{};
};

template <class Number>
std::vector<std::byte> at_odd_address(const std::vector<Number>& numbers) {
  std::vector<std::byte> bytes(1 + numbers.size() * sizeof(Number));
  if (!numbers.empty()) {
    std::memcpy(bytes.data() + 1, numbers.data(), numbers.size() * sizeof(Number));
  }
  return bytes;
}

void store_token(std::int64_t token, std::int64_t bytes, std::byte* at) {
  std::memcpy(at, &token, static_cast<std::size_t>(bytes));  // little-endian
}

MadeFiles make_files(Random& random, const trackbed::SampleShape& shape) {
  constexpr std::int64_t kTypes[] = {1, 2, 3, 4, 5, 8};
  MadeFiles made;
  made.dtype = kTypes[random.below(6)];
  made.token_bytes = trackbed::token_bytes_of(made.dtype);
  std::int64_t first_byte = 0;
  for (std::size_t file = 0; file < 1 + random.below(3); ++file) {
    std::vector<std::int32_t> lengths(random.below(9));
    std::vector<std::int64_t> pointers;
    std::int64_t total = 0;
    const std::size_t first_sequence = made.sequences.size();
    for (std::int32_t& length : lengths) {
      length = static_cast<std::int32_t>(random.below(random.below(2) == 0 ? 4 : 60));
      pointers.push_back(total * made.token_bytes);
      total += length;
      std::vector<std::int64_t> sequence(static_cast<std::size_t>(length));
      for (std::int64_t& token : sequence) {
        token = static_cast<std::int64_t>(random.below(12));
      }
      made.sequences.push_back(sequence);
    }
    std::vector<std::byte> tokens(static_cast<std::size_t>(total * made.token_bytes));
    std::size_t at = 0;
    for (std::size_t number = first_sequence; number < made.sequences.size(); ++number) {
      for (const std::int64_t token : made.sequences[number]) {
        store_token(token, made.token_bytes, tokens.data() + at);
        at += static_cast<std::size_t>(made.token_bytes);
      }
    }
    made.tokens.push_back(std::move(tokens));
    made.lengths.push_back(at_odd_address(lengths));
    made.pointers.push_back(at_odd_address(pointers));
    static constexpr std::byte kEmpty{};
    made.files.push_back({total == 0 ? &kEmpty : made.tokens.back().data(), total * made.token_bytes,
                          made.lengths.back().data() + 1, made.pointers.back().data() + 1,
                          static_cast<std::int64_t>(lengths.size()), static_cast<std::int64_t>(first_sequence),
                          first_byte, total * made.token_bytes});
    first_byte += total * made.token_bytes;
  }
  const std::int64_t num_tokens = first_byte / made.token_bytes;
  const std::int64_t num_samples = std::max<std::int64_t>(num_tokens - shape.extra, 0) / shape.length;
  made.source = {.first_file = 0,
                 .num_files = static_cast<std::int64_t>(made.files.size()),
                 .dtype = made.dtype,
                 .num_samples = num_samples,
                 .origin_byte = 0,
                 .visits = nullptr,
                 .num_visits = 0,
                 .visit_bytes = 8,
                 .rows = nullptr,
                 .row_bytes = 8,
                 .shuffle = nullptr,
                 .shuffle_bytes = 4,
                 .may_be_short = 0};
  if (random.below(2) == 0 && num_samples > 0) {
    std::vector<std::int32_t> lengths;
    for (std::size_t number = 0; number < made.sequences.size(); ++number) {
      made.visits.push_back(static_cast<std::int64_t>(number));
      lengths.push_back(static_cast<std::int32_t>(made.sequences[number].size()));
    }
    made.rows =
        naive_sample_index(lengths, made.visits, static_cast<std::size_t>(num_samples) + 1, shape.length, shape.extra);
    for (std::int64_t sample = num_samples; sample-- > 0;) {
      made.shuffle.push_back(static_cast<std::uint32_t>(sample));
    }
    made.source.visits = reinterpret_cast<const std::byte*>(made.visits.data());
    made.source.num_visits = static_cast<std::int64_t>(made.visits.size());
    made.source.rows = reinterpret_cast<const std::byte*>(made.rows.data());
    made.source.shuffle = reinterpret_cast<const std::byte*>(made.shuffle.data());
  }
  return made;
}

struct MadeBatch {
  MadeBatch(std::size_t size, std::size_t length)
      : tokens(size * length, 77),
        labels(size * length, 77),
        position_ids(size * length, 77),
        loss_mask(size * length, 77),
        attention_mask(size * length * length, 77),
        cu_seqlens(size * (length + 1), 77),
        max_seqlen(size, 77) {}

  trackbed::BatchRows rows() {
    return {tokens.data(),         labels.data(),     loss_mask.data(), position_ids.data(),
            attention_mask.data(), cu_seqlens.data(), max_seqlen.data()};
  }

  bool operator==(const MadeBatch&) const = default;

  std::vector<std::int64_t> tokens;
  std::vector<std::int64_t> labels;
  std::vector<std::int64_t> position_ids;
  std::vector<float> loss_mask;
  std::vector<std::uint8_t> attention_mask;
  std::vector<std::int32_t> cu_seqlens;
  std::vector<std::int32_t> max_seqlen;
};

// One sample, token by token: with visits in ascending order, sample m is tokens [m * S, m * S + S + extra).
void naive_gather(const MadeFiles& made, std::int64_t sample, const trackbed::SampleShape& shape, std::size_t row,
                  MadeBatch& batch) {
  const auto length = static_cast<std::size_t>(shape.length);
  std::vector<std::int64_t> all;
  std::vector<std::int64_t> ends;
  std::vector<bool> begins_another(length + 1);  // of labels
  const std::int64_t start = sample * shape.length;
  for (const std::vector<std::int64_t>& sequence : made.sequences) {
    all.insert(all.end(), sequence.begin(), sequence.end());
    const std::int64_t end = static_cast<std::int64_t>(all.size()) - start;
    if (end > 0 && end <= shape.length) {
      begins_another[static_cast<std::size_t>(end - 1)] = shape.masks_borders != 0;
    }
    if (end > 0 && end < shape.length && (ends.empty() || ends.back() != end)) {
      ends.push_back(end);
    }
  }
  std::vector<std::int64_t> text(all.begin() + start, all.begin() + start + shape.length + shape.extra);
  text.resize(length + 1, shape.pad);
  std::size_t began = 0;
  std::vector<std::size_t> document(length);
  for (std::size_t at = 0; at < length; ++at) {
    if (at > 0 && text[at - 1] == shape.eod) {
      began = at;
    }
    document[at] = began;
    const std::size_t place = row * length + at;
    batch.tokens[place] = text[at] == shape.pad ? 0 : text[at];
    batch.labels[place] = text[at + 1] == shape.pad ? 0 : text[at + 1];
    batch.position_ids[place] = static_cast<std::int64_t>(shape.resets_positions != 0 ? at - began : at);
    const bool is_masked_input = shape.masks_eod != 0 && text[at] == shape.eod;
    batch.loss_mask[place] = text[at + 1] == shape.pad || is_masked_input || begins_another[at] ? 0.0F : 1.0F;
  }
  for (std::size_t at = 0; at < length; ++at) {
    for (std::size_t other = 0; other < length; ++other) {
      batch.attention_mask[(row * length + at) * length + other] = other > at || document[at] != document[other];
    }
  }
  ends.push_back(shape.length);
  std::int64_t before = 0;
  std::int64_t longest = 0;
  batch.cu_seqlens[row * (length + 1)] = 0;
  for (std::size_t at = 0; at < length; ++at) {
    const std::int64_t end = at < ends.size() ? ends[at] : shape.length;
    batch.cu_seqlens[row * (length + 1) + at + 1] = static_cast<std::int32_t>(end);
    longest = std::max(longest, end - before);
    before = end;
  }
  batch.max_seqlen[row] = static_cast<std::int32_t>(longest);
}

trackbed::SampleShape make_shape(Random& random) {
  return {.length = static_cast<std::int64_t>(1 + random.below(40)),
          .extra = static_cast<std::int64_t>(random.below(2)),
          .pad = random.below(2) == 0 ? -1 : 7,
          .eod = random.below(4) == 0 ? 7 : 9,
          .resets_positions = static_cast<std::int64_t>(random.below(2)),
          .masks_eod = static_cast<std::int64_t>(random.below(2)),
          .keeps_documents_apart = 0,
          .masks_borders = static_cast<std::int64_t>(random.below(2))};
}

// Bytes of files, cut out in buffers without slack: those that are missing, or some more.
struct Pieces {
  Pieces() = default;
  Pieces(const MadeFiles& made, std::vector<trackbed::Missing> missing, Random& random) {
    std::sort(missing.begin(), missing.end(), [](const auto& one, const auto& other) {
      return std::tie(one.file, one.start) < std::tie(other.file, other.start);
    });
    for (const trackbed::Missing& one : missing) {
      trackbed::Missing* const last = joined_.empty() ? nullptr : &joined_.back();
      if (last != nullptr && last->file == one.file && (one.start <= last->stop || random.below(2) == 0)) {
        last->stop = std::max(last->stop, one.stop);
      } else {
        joined_.push_back(one);
      }
    }
    for (const trackbed::Missing& one : joined_) {
      const std::vector<std::byte>& tokens = made.tokens[static_cast<std::size_t>(one.file)];
      bytes_.emplace_back(tokens.begin() + one.start, tokens.begin() + one.stop);
      fetched.push_back({one.file, one.start, one.stop, bytes_.back().data()});
    }
  }

  std::vector<trackbed::Fetched> fetched;

 private:
  std::vector<trackbed::Missing> joined_;
  std::vector<std::vector<std::byte>> bytes_;
};

// The files, some of which are not mapped.
std::vector<trackbed::TokenFile> without_tokens(const MadeFiles& made, Random& random) {
  std::vector<trackbed::TokenFile> files = made.files;
  for (trackbed::TokenFile& file : files) {
    file.tokens = random.below(4) == 0 ? file.tokens : nullptr;
  }
  return files;
}

void test_gather(std::size_t rounds) {
  Random random(70);
  trackbed::Workers workers;
  trackbed::Poll poll;
  for (std::size_t round = 0; round < rounds; ++round) {
    const trackbed::SampleShape shape = make_shape(random);
    const MadeFiles made = make_files(random, shape);
    const auto count = static_cast<std::size_t>(made.source.num_samples);
    std::vector<std::int64_t> positions;
    MadeBatch wanted(count == 0 ? 0 : 5, static_cast<std::size_t>(shape.length));
    for (std::size_t row = 0; row < 5 && count > 0; ++row) {
      const std::size_t sample = random.below(count);
      naive_gather(made, static_cast<std::int64_t>(sample), shape, row, wanted);
      positions.push_back(static_cast<std::int64_t>(made.shuffle.empty() ? sample : count - 1 - sample));
    }
    const std::vector<std::int32_t> datasets(positions.size(), 0);
    for (const Isa level : levels()) {
      MadeBatch found(positions.size(), static_cast<std::size_t>(shape.length));
      const trackbed::Gathered outcome =
          trackbed::gather({&made.source, 1}, {made.files, {}}, datasets, positions, shape, found.rows(), level,
                           static_cast<int>(1 + round % 3), workers, poll);
      check(outcome.refused == static_cast<std::int64_t>(positions.size()) && outcome.absent.empty() &&
                outcome.missing.empty() && found == wanted,
            "gather " + name_of(level) + " round " + std::to_string(round));
      MadeBatch fetched(positions.size(), static_cast<std::size_t>(shape.length));
      const Pieces none;
      const auto remote = without_tokens(made, random);
      const auto gather_remote = [&](const Pieces& pieces) {
        return trackbed::gather({&made.source, 1}, {remote, pieces.fetched}, datasets, positions, shape, fetched.rows(),
                                level, static_cast<int>(1 + round % 3), workers, poll);
      };
      const Pieces pieces(made, gather_remote(none).missing, random);
      check(gather_remote(pieces).missing.empty() && fetched == wanted,
            "gather of fetched bytes " + name_of(level) + " round " + std::to_string(round));
    }
  }
}

// Damaged files and arrays must not lead to reads outside of them, which sanitizers detect.
void test_gather_of_lies(std::size_t rounds) {
  Random random(71);
  trackbed::Workers workers;
  trackbed::Poll poll;
  constexpr std::int64_t kFar[] = {-1,
                                   1,
                                   7,
                                   std::int64_t{1} << 31,
                                   std::int64_t{1} << 62,
                                   -(std::int64_t{1} << 62),
                                   std::numeric_limits<std::int64_t>::max(),
                                   std::numeric_limits<std::int64_t>::min()};
  const auto lie = [&](auto& number) {
    const auto far = kFar[random.below(8)];
    number = static_cast<std::remove_reference_t<decltype(number)>>(random.below(2) == 0 ? far : number + far % 16);
  };
  const auto lie_in = [&](std::vector<std::byte>& bytes, std::size_t size) {
    if (bytes.size() > size) {
      const std::size_t at = 1 + random.below((bytes.size() - 1) / size) * size;
      std::int64_t number = 0;
      std::memcpy(&number, bytes.data() + at, size);
      lie(number);
      std::memcpy(bytes.data() + at, &number, size);
    }
  };
  long refused = 0;
  for (std::size_t round = 0; round < rounds; ++round) {
    const trackbed::SampleShape shape = make_shape(random);
    MadeFiles made = make_files(random, shape);
    const std::size_t file = random.below(made.files.size());
    switch (random.below(7)) {
      case 0:
        lie_in(made.lengths[file], 4);
        break;
      case 1:
        lie_in(made.pointers[file], 8);
        break;
      case 2:
        lie(made.source.origin_byte);
        break;
      case 3:
        lie(made.files[file].first_byte);
        break;
      case 4:
        lie(made.files[file].first_sequence);
        break;
      case 5:
        lie(made.files[file].token_bytes);
        break;
      default:
        if (!made.rows.empty()) {
          lie(made.rows[random.below(made.rows.size())]);
          lie(made.visits[random.below(made.visits.size())]);
          lie(made.shuffle[random.below(made.shuffle.size())]);
        }
    }
    std::vector<std::int64_t> positions;
    for (std::int64_t sample = -1; sample <= made.source.num_samples && sample < 20; ++sample) {
      positions.push_back(sample);
    }
    const std::vector<std::int32_t> datasets(positions.size(), 0);
    MadeBatch batch(positions.size(), static_cast<std::size_t>(shape.length));
    const auto gather = [&](const std::vector<trackbed::TokenFile>& files, const Pieces& pieces) {
      return trackbed::gather({&made.source, 1}, {files, pieces.fetched}, datasets, positions, shape, batch.rows(),
                              trackbed::best_isa(), 1, workers, poll);
    };
    const trackbed::Gathered outcome = gather(made.files, {});
    const auto remote = without_tokens(made, random);
    check(gather(remote, {made, gather(remote, {}).missing, random}).refused == outcome.refused,
          "gather refuses the same lies of fetched bytes");
    refused += outcome.refused < static_cast<std::int64_t>(positions.size());
  }
  check(refused > static_cast<long>(rounds) / 2, "gather refuses lies");
}

// ---------------------------------------------------------------- masked samples

// A configuration of masked samples, with the tables that it points to.
struct MadeMasking {
  static constexpr std::int64_t kCls = 20, kSep = 21, kMask = 22, kBos = 23, kEos = 24, kPad = 25, kSentinel = 30;

  std::vector<std::uint8_t> kinds = std::vector<std::uint8_t>(26, 0);
  std::vector<double> cumulative;
  std::vector<std::int64_t> listed;
  std::vector<std::int64_t> sentinels;
  std::vector<std::uint32_t> rows;  // one sample: all sentences
  trackbed::MaskingRules rules{};
};

MadeMasking make_masking(Random& random, MadeFiles& made) {
  MadeMasking masking;
  const bool is_t5 = random.below(2) == 0;
  for (std::size_t token = 0; token < 12; ++token) {
    masking.kinds[token] = random.below(3) == 0 ? 1 : 0;
    masking.listed.push_back(static_cast<std::int64_t>(token));
  }
  const std::size_t ngrams = 1 + random.below(4);
  for (std::size_t words = 1; words <= ngrams; ++words) {
    masking.cumulative.push_back(static_cast<double>(words) / static_cast<double>(ngrams));
  }
  for (std::int64_t number = 0; number < 300; ++number) {
    masking.sentinels.push_back(MadeMasking::kSentinel + number);
  }
  const auto target = static_cast<std::uint32_t>(1 + random.below(80));
  masking.rows = {0, static_cast<std::uint32_t>(made.sequences.size()), target};
  const std::int64_t length = target + static_cast<std::int64_t>(3 + random.below(5));
  masking.rules = {.is_t5 = is_t5 ? 1 : 0,
                   .length = length,
                   .decoder_length = is_t5 ? 2 * length + 1 : 0,
                   .seed = static_cast<std::int64_t>(random.below(std::size_t{1} << 32)),
                   .pad = MadeMasking::kPad,
                   .cls = MadeMasking::kCls,
                   .sep = MadeMasking::kSep,
                   .mask = MadeMasking::kMask,
                   .bos = MadeMasking::kBos,
                   .eos = MadeMasking::kEos,
                   .has_segments = !is_t5 && made.sequences.size() > 1 ? 1 : 0,
                   .full_words = static_cast<std::int64_t>(random.below(2)),
                   .is_geometric = static_cast<std::int64_t>(random.below(2)),
                   .permutes = 0,
                   .probability = 0.05 + 0.9 * random.unit(),
                   .cumulative = masking.cumulative.data(),
                   .max_ngram = static_cast<std::int64_t>(ngrams),
                   .kinds = masking.kinds.data(),
                   .num_kinds = static_cast<std::int64_t>(masking.kinds.size()),
                   .listed = masking.listed.data(),
                   .num_listed = static_cast<std::int64_t>(masking.listed.size()),
                   .sentinels = masking.sentinels.data(),
                   .num_sentinels = static_cast<std::int64_t>(masking.sentinels.size())};
  masking.rules.permutes = masking.rules.is_geometric == 0 ? static_cast<std::int64_t>(random.below(2)) : 0;
  made.source.visits = nullptr;
  made.source.rows = reinterpret_cast<const std::byte*>(masking.rows.data());
  made.source.row_bytes = 4;
  made.source.num_samples = 1;
  return masking;
}

// Memory for a batch of masked samples, without slack.
struct MadeMaskedBatch {
  MadeMaskedBatch(const trackbed::MaskingRules& rules, std::size_t size)
      : arrays(10), length(static_cast<std::size_t>(rules.length)) {
    const auto decoder = static_cast<std::size_t>(rules.decoder_length);
    const std::size_t labels = rules.is_t5 != 0 ? decoder : length;
    const std::size_t lengths[] = {length, labels, labels, 1, length, length, 1, length, decoder, decoder};
    for (std::size_t number = 0; number < arrays.size(); ++number) {
      arrays[number].assign(size * lengths[number], -7);
    }
  }
  trackbed::MaskedRows rows() {
    return {arrays[0].data(), arrays[1].data(), arrays[2].data(), arrays[3].data(), arrays[4].data(),
            arrays[5].data(), arrays[6].data(), arrays[7].data(), arrays[8].data(), arrays[9].data()};
  }
  std::vector<std::vector<std::int64_t>> arrays;
  std::size_t length;
};

trackbed::Gathered gather_one(const MadeFiles& made, const MadeMasking& masking, std::int64_t position,
                              MadeMaskedBatch& batch, Isa level, trackbed::Workers& workers) {
  trackbed::Poll poll;
  const std::int32_t dataset = 0;
  return trackbed::gather_masked({&made.source, 1}, {made.files, {}}, {&dataset, 1}, {&position, 1}, masking.rules,
                                 batch.rows(), level, 1, workers, poll);
}

// The tokens of a sample with what was masked put back; without special tokens, cls and sep.
std::vector<std::int64_t> restored(const MadeMasking& masking, const MadeMaskedBatch& batch) {
  std::vector<std::int64_t> tokens;
  std::size_t next = 1;  // of the decoder, after bos
  for (std::size_t at = 0; at < batch.length; ++at) {
    const std::int64_t token = batch.arrays[0][at];
    if (masking.rules.is_t5 == 0) {
      const bool is_text = batch.arrays[5][at] == 1 && token != MadeMasking::kCls && token != MadeMasking::kSep;
      if (is_text) {
        tokens.push_back(batch.arrays[2][at] == 1 ? batch.arrays[1][at] : token);
      }
    } else if (batch.arrays[7][at] == 1 && token >= MadeMasking::kSentinel) {
      const std::vector<std::int64_t>& decoder = batch.arrays[8];
      check(decoder[next] == token, "spans are in the order of their sentinels");
      for (++next; next < decoder.size() && batch.arrays[9][next] == 1 && decoder[next] < MadeMasking::kBos; ++next) {
        tokens.push_back(decoder[next]);
      }
    } else if (batch.arrays[7][at] == 1) {
      tokens.push_back(token);
    }
  }
  return tokens;
}

void test_masked(std::size_t rounds) {
  Random random(72);
  trackbed::Workers workers;
  for (std::size_t round = 0; round < rounds; ++round) {
    MadeFiles made =
        make_files(random, {.length = 8, .extra = 0, .pad = 0, .eod = 0, .resets_positions = 0, .masks_eod = 0});
    const MadeMasking masking = make_masking(random, made);
    MadeMaskedBatch first(masking.rules, 1);
    const auto outcome = gather_one(made, masking, 0, first, levels().front(), workers);
    if (made.sequences.empty()) {
      check(outcome.refused == 0, "a sample of no sentence is refused");
      continue;
    }
    check(outcome.refused == 1 && outcome.absent.empty(), "masked sample of round " + std::to_string(round));
    for (const Isa level : levels()) {
      MadeMaskedBatch other(masking.rules, 1);
      gather_one(made, masking, 0, other, level, workers);
      check(other.arrays == first.arrays, "masked sample " + name_of(level) + " round " + std::to_string(round));
    }
    std::vector<std::int64_t> tokens;
    for (const auto& sequence : made.sequences) {
      tokens.insert(tokens.end(), sequence.begin(), sequence.end());
    }
    const bool is_whole = tokens.size() <= masking.rows[2];
    check(first.arrays[3][0] == (is_whole ? 0 : 1), "a sample says whether it is cut");
    const bool is_in_order = masking.rules.is_t5 != 0 || first.arrays[6][0] == 0;
    if (is_in_order && (is_whole || masking.rules.is_t5 != 0)) {
      tokens.resize(std::min<std::size_t>(tokens.size(), masking.rows[2]));
      std::vector<std::int64_t> found = restored(masking, first);
      if (masking.rules.permutes != 0 && masking.rules.is_t5 != 0) {  // permuted tokens have no label there
        std::sort(found.begin(), found.end());
        std::sort(tokens.begin(), tokens.end());
      }
      check(found == tokens, "labels restore the tokens of round " + std::to_string(round));
    }
  }
}

// Damaged rows, files and rules must not lead to reads or writes outside of them, which sanitizers detect.
void test_masked_lies(std::size_t rounds) {
  Random random(73);
  trackbed::Workers workers;
  long refused = 0;
  for (std::size_t round = 0; round < rounds; ++round) {
    MadeFiles made =
        make_files(random, {.length = 8, .extra = 0, .pad = 0, .eod = 0, .resets_positions = 0, .masks_eod = 0});
    MadeMasking masking = make_masking(random, made);
    const std::size_t file = random.below(made.files.size());
    const auto far = static_cast<std::int64_t>(random.next()) >> random.below(63);
    std::int64_t position = -1;
    switch (random.below(8)) {
      case 0:
        masking.rows[random.below(3)] = static_cast<std::uint32_t>(far);
        break;
      case 1:
        position = far;
        break;
      case 2:
        made.files[file].first_sequence = far;
        break;
      case 3:
        made.files[file].size_bytes = made.files[file].size_bytes / 2;
        break;
      case 4:
        masking.rules.num_sentinels = static_cast<std::int64_t>(random.below(2));
        break;
      case 5:
        masking.rules.num_kinds = static_cast<std::int64_t>(random.below(12));
        break;
      case 6:
        masking.rules.decoder_length = masking.rules.is_t5;
        break;
      default:
        if (made.lengths[file].size() > 8) {
          const auto lie = static_cast<std::int32_t>(far);
          std::memcpy(made.lengths[file].data() + 1, &lie, sizeof(lie));
        }
    }
    MadeMaskedBatch batch(masking.rules, 1);
    refused += gather_one(made, masking, position, batch, trackbed::best_isa(), workers).refused == 0;
  }
  check(refused > static_cast<long>(rounds) / 4, "masked samples of lies are refused");
}

void test_workers() {
  trackbed::Workers workers;
  trackbed::Poll poll;
  for (const int threads : {1, 2, 5, 3}) {
    for (int again = 0; again < 50; ++again) {
      std::vector<int> done(100, 0);
      workers.run(100, threads, poll, [&](std::int64_t task) { ++done[static_cast<std::size_t>(task)]; });
      check(done == std::vector<int>(100, 1), "workers call every task once");
    }
    bool thrown = false;
    try {
      workers.run(100, threads, poll, [&](std::int64_t task) {
        if (task == 50) {
          throw 50;
        }
      });
    } catch (int number) {
      thrown = number == 50;
    }
    check(thrown, "workers throw what a task threw");
    const auto started = std::chrono::steady_clock::now();
    trackbed::Poll stopping([](std::int64_t) { throw 20; });
    thrown = false;
    try {
      workers.run(1000000, threads, stopping,
                  [](std::int64_t) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); });
    } catch (int number) {
      thrown = number == 20;
    }
    const auto taken = std::chrono::steady_clock::now() - started;
    check(thrown && taken < std::chrono::seconds(20), "workers end when the poll throws");
  }
  std::vector<std::thread> callers;
  std::atomic<long> sum{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int again = 0; again < 100; ++again) {
        trackbed::Poll quiet;
        workers.run(10, 3, quiet, [&](std::int64_t task) { sum += task; });
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  check(sum == 4 * 100 * 45, "workers serve several threads");
}

// Kernels share only their inputs: concurrent calls give the same results as single ones.
void test_threads(std::size_t rounds) {
  Random random(66);
  const std::vector<double> weights = make_weights(random, 37, Weights::random);
  const std::vector<std::int64_t> sizes{5, 1, 17, 3, 8, 8, 8, 2, 30};
  std::vector<std::int32_t> lengths(50);
  std::vector<std::int64_t> visits(200);
  for (std::int32_t& length : lengths) {
    length = static_cast<std::int32_t>(random.below(40));
  }
  for (std::int64_t& visit : visits) {
    visit = static_cast<std::int64_t>(random.below(lengths.size()));
  }
  const Blend greedy = naive_blend(weights, 300, {});
  const Blend exhaustive = naive_exhaustive(sizes);
  const auto rows = naive_sample_index(lengths, visits, 100, 32, 1);

  constexpr std::size_t kThreads = 8;
  std::vector<long> wrong(kThreads, 0);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t round = 0; round < rounds; ++round) {
        for (const Isa level : levels()) {
          wrong[t] += !equal(run_greedy<std::int16_t>(weights, 300, level), greedy);
          wrong[t] += !equal(run_exhaustive<std::int32_t>(sizes, exhaustive.dataset.size(), level), exhaustive);
        }
        wrong[t] += run_sample_index<std::int64_t, std::int64_t>(lengths, visits, 100, 32, 1) != rows;
        std::vector<std::uint16_t> stored(visits.size());
        wrong[t] += trackbed::narrow<std::int64_t, std::uint16_t>(visits, stored) != visits.size();
      }
    });
  }
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads[t].join();
    check(wrong[t] == 0, "thread " + std::to_string(t) + ": " + std::to_string(wrong[t]) + " wrong results");
  }
}

// ---------------------------------------------------------------- sums over ranks

// Numbers of either type, some of them not finite, subnormal, or such that sums are ties.
template <class Float, class Bits>
std::vector<Float> make_numbers(Random& random, std::size_t count) {
  std::vector<Float> numbers(count);
  for (Float& number : numbers) {
    const auto bits = static_cast<Bits>(random.next());
    switch (random.below(4)) {
      case 0:
        number = std::bit_cast<Float>(bits);
        break;
      case 1:
        number = std::bit_cast<Float>(static_cast<Bits>(bits >> 16));
        break;
      default:
        number = static_cast<Float>(1 + random.below(64)) * (bits % 2 == 0 ? Float{0.125} : Float{-1e6});
    }
  }
  return numbers;
}

template <class Float>
bool same_bits(const std::vector<Float>& one, const std::vector<Float>& other) {
  for (std::size_t i = 0; i < one.size(); ++i) {
    const bool both_nan = one[i] != one[i] && other[i] != other[i];
    if (!both_nan && std::memcmp(&one[i], &other[i], sizeof(Float)) != 0) {
      return false;
    }
  }
  return true;
}

// The sum of one element over all ranks: of n with h = ceil(n / 2), rank r adds rank r + h, until one is left.
template <class Float>
Float naive_tree_sum(std::vector<Float> terms) {
  while (terms.size() > 1) {
    const std::size_t half = (terms.size() + 1) / 2;
    for (std::size_t i = half; i < terms.size(); ++i) {
      terms[i - half] += terms[i];
    }
    terms.resize(half);
  }
  return terms[0];
}

template <class Float, class Bits>
void test_sum_ranks_of(trackbed::Number number, std::size_t rounds) {
  Random random(700 + sizeof(Float));
  for (std::size_t round = 0; round < rounds; ++round) {
    const std::size_t num_ranks = 1 + round % 9;
    const std::size_t count = round % 50 == 0 ? 600'000 : random.below(1500);
    const std::size_t start = random.below(count + 1);
    const std::size_t stop = start + random.below(count - start + 1);
    const std::size_t owner = random.below(2) == 0 ? num_ranks : random.below(num_ranks);
    const double factor = random.below(3) == 0 ? 1.0 : random.unit();
    const double divisor = random.below(2) == 0 ? 1.0 : static_cast<double>(num_ranks);
    std::vector<std::vector<Float>> before(num_ranks);
    for (std::vector<Float>& buffer : before) {
      buffer = make_numbers<Float, Bits>(random, count);
    }
    auto wanted = before;
    for (std::size_t i = start; i < stop; ++i) {
      std::vector<Float> terms;
      for (std::vector<Float>& buffer : wanted) {
        buffer[i] *= static_cast<Float>(factor);
        terms.push_back(buffer[i]);
      }
      const Float sum = naive_tree_sum(terms) / static_cast<Float>(divisor);
      for (std::size_t rank = 0; rank < num_ranks; ++rank) {
        wanted[rank][i] = owner < num_ranks && rank != owner ? wanted[rank][i] : sum;
      }
    }
    for (const Isa level : levels()) {
      auto found = before;
      std::vector<std::byte*> buffers;
      for (std::vector<Float>& buffer : found) {
        buffers.push_back(reinterpret_cast<std::byte*>(buffer.data()));
      }
      const trackbed::RankSum sum{buffers.data(), num_ranks, number, start, stop, factor, divisor, owner};
      trackbed::Poll poll;
      trackbed::sum_ranks(sum, level, 1 + static_cast<int>(round % 3), poll);
      bool same = true;
      for (std::size_t rank = 0; rank < num_ranks; ++rank) {
        same = same && same_bits(found[rank], wanted[rank]);
      }
      check(same, "sum_ranks at " + name_of(level) + " of " + std::to_string(8 * sizeof(Float)) + " bits, round " +
                      std::to_string(round));
    }
  }
}

// Each of all numbers of 16 bits, plus zero on another rank: the conversions must give it back.
void test_numbers_of_16_bits_keep_their_value() {
  for (const auto number : {trackbed::Number::bfloat16, trackbed::Number::float16}) {
    const std::uint16_t infinity = number == trackbed::Number::bfloat16 ? 0x7f80 : 0x7c00;
    for (const Isa level : levels()) {
      for (const std::size_t num_ranks : {2, 3}) {
        std::vector<std::vector<std::uint16_t>> rows(num_ranks, std::vector<std::uint16_t>(1 << 16, 0x8000));
        std::iota(rows[0].begin(), rows[0].end(), std::uint16_t{0});
        std::vector<std::byte*> buffers;
        for (auto& row : rows) {
          buffers.push_back(reinterpret_cast<std::byte*>(row.data()));
        }
        trackbed::Poll poll;
        trackbed::sum_ranks({buffers.data(), num_ranks, number, 0, 1 << 16, 1.0, 1.0, num_ranks}, level, 1, poll);
        bool same = true;
        for (std::size_t bits = 0; bits < 1 << 16; ++bits) {
          const bool is_nan = (bits & 0x7fff) > infinity;
          const bool keeps = is_nan ? (rows[0][bits] & 0x7fff) > infinity : rows[0][bits] == bits;
          same = same && keeps && rows[num_ranks - 1][bits] == rows[0][bits];
        }
        check(same, "numbers of 16 bits keep their value at " + name_of(level));
      }
    }
  }
}

void test_sum_ranks(std::size_t rounds) {
  test_sum_ranks_of<float, std::uint32_t>(trackbed::Number::float32, rounds);
  test_sum_ranks_of<double, std::uint64_t>(trackbed::Number::float64, rounds);
  test_numbers_of_16_bits_keep_their_value();
}

double widen_half(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  return exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
}

// Adds a square to digits of 32 bits, one bit after the other.
void naive_add_square(double number, std::vector<std::int64_t>& digits) {
  const double square = rounded_product(number, number);
  int exponent = 0;
  const double fraction = std::frexp(square, &exponent);
  const int place = exponent - 53 - trackbed::kSquareUnit;  // of the last of 53 bits
  const auto units = static_cast<std::uint64_t>(
      place >= 0 ? std::ldexp(fraction, 53) : std::nearbyint(std::ldexp(square, -trackbed::kSquareUnit)));
  for (int bit = 0; bit < 64; ++bit) {
    if ((units >> bit & 1) != 0) {
      const int at = std::max(place, 0) + bit;
      digits[static_cast<std::size_t>(at / 32)] += std::int64_t{1} << at % 32;
    }
  }
}

// Finite numbers of some exponents: a few neighbours, or all of them.
template <class Element>
std::vector<Element> make_finite(Random& random, std::size_t count, int width, int highest) {
  std::vector<Element> numbers(count);
  const std::size_t spread = random.below(2) == 0 ? 8 : static_cast<std::size_t>(highest);
  const std::size_t first = random.below(static_cast<std::size_t>(highest));
  for (Element& number : numbers) {
    const std::size_t exponent = std::min<std::size_t>(first + random.below(spread), static_cast<std::size_t>(highest));
    const std::uint64_t mantissa = random.next() & ((std::uint64_t{1} << width) - 1);
    const std::uint64_t sign = random.next() << (8 * sizeof(Element) - 1);
    number = static_cast<Element>(random.below(9) == 0 ? 0 : sign | std::uint64_t{exponent} << width | mantissa);
  }
  return numbers;
}

template <class Element, class Widen>
void test_square_sum_of(trackbed::Number type, std::size_t rounds, int width, int highest, const Widen& widen) {
  Random random(800 + static_cast<std::size_t>(type));
  for (std::size_t round = 0; round < rounds; ++round) {
    const std::size_t count = round == 0 ? trackbed::kSquareTask + 3000 : random.below(5000);
    const std::vector<Element> numbers = make_finite<Element>(random, count, width, highest);
    std::vector<std::int64_t> wanted(trackbed::kSquareSumSize, 0);
    for (const Element number : numbers) {
      naive_add_square(widen(number), wanted);
    }
    for (std::size_t i = 0; i + 1 < trackbed::kSquareDigits; ++i) {
      wanted[i + 1] += wanted[i] >> 32;
      wanted[i] &= 0xffffffff;
    }
    for (const Isa level : levels()) {
      std::vector<std::int64_t> found(trackbed::kSquareSumSize, -1);
      trackbed::Poll poll;
      trackbed::square_sum(reinterpret_cast<const std::byte*>(numbers.data()), type, count, found, level,
                           1 + static_cast<int>(round % 3), poll);
      check(found == wanted, "square_sum " + name_of(level) + " of type " + std::to_string(static_cast<int>(type)) +
                                 ", round " + std::to_string(round));
    }
  }
}

void test_square_sum_counts_what_is_not_finite() {
  std::vector<float> numbers(3000, 1.5F);
  numbers[7] = numbers[2999] = std::numeric_limits<float>::quiet_NaN();
  numbers[2048] = -std::numeric_limits<float>::infinity();
  std::vector<std::int64_t> wanted(trackbed::kSquareSumSize, 0);
  wanted[trackbed::kSquareDigits] = 2;
  wanted[trackbed::kSquareDigits + 1] = 1;
  for (const Isa level : levels()) {
    std::vector<std::int64_t> found(trackbed::kSquareSumSize, -1);
    trackbed::Poll poll;
    trackbed::square_sum(std::as_bytes(std::span(numbers)).data(), trackbed::Number::float32, numbers.size(), found,
                         level, 1, poll);
    check(found == wanted, "square_sum " + name_of(level) + " counts what is not finite");
  }
}

void test_square_sum(std::size_t rounds) {
  using trackbed::Number;
  const auto of_float = [](std::uint32_t bits) { return static_cast<double>(std::bit_cast<float>(bits)); };
  test_square_sum_of<std::uint32_t>(Number::float32, rounds, 23, 254, of_float);
  test_square_sum_of<std::uint64_t>(Number::float64, rounds, 52, 1023 + 127,
                                    [](std::uint64_t bits) { return std::bit_cast<double>(bits); });
  test_square_sum_of<std::uint16_t>(Number::bfloat16, rounds, 7, 254,
                                    [&](std::uint16_t bits) { return of_float(std::uint32_t{bits} << 16); });
  test_square_sum_of<std::uint16_t>(Number::float16, rounds, 10, 30,
                                    [](std::uint16_t bits) { return widen_half(bits & 0x7fff); });
  test_square_sum_counts_what_is_not_finite();
}

// ---------------------------------------------------------------- golden checksums

// FNV-1a hash of numbers as 64-bit little-endian integers.
class Golden {
 public:
  template <class Numbers>
  void add(const Numbers& numbers) {
    for (const auto number : numbers) {
      for (int byte = 0; byte < 8; ++byte) {
        hash_ ^= static_cast<std::uint64_t>(static_cast<std::int64_t>(number)) >> (8 * byte) & 0xff;
        hash_ *= 0x100000001b3;
      }
    }
  }
  std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325;
};

void check_golden(const char* kernel, const Golden& golden, std::uint64_t wanted) {
  std::printf("golden %s %016llx\n", kernel, static_cast<unsigned long long>(golden.value()));
  check(golden.value() == wanted, std::string("golden checksum of ") + kernel);
}

void test_golden() {
  Random random(77);
  Golden greedy;
  Golden exhaustive;
  Golden largest;
  const Isa best = trackbed::best_isa();
  for (std::size_t size = 1; size <= 100; ++size) {
    std::vector<double> weights = make_weights(random, size, Weights::random);
    double sum = 0.0;
    for (const double weight : weights) {
      sum += weight;
    }
    std::vector<std::int64_t> sizes;
    for (double& weight : weights) {
      sizes.push_back(static_cast<std::int64_t>(1 + random.below(20)));
      weight /= sum;
    }
    const Blend blend = run_greedy<std::int32_t>(weights, 1000, best);
    greedy.add(blend.dataset);
    greedy.add(blend.sample);
    std::int64_t total = 0;
    for (const std::int64_t each : sizes) {
      total += each;
    }
    const Blend even = run_exhaustive<std::int32_t>(sizes, static_cast<std::size_t>(total), best);
    exhaustive.add(even.dataset);
    exhaustive.add(even.sample);
    for (int step = 1; step <= 100; ++step) {
      std::vector<double> counts;
      for (const double weight : weights) {
        // The error is the rounding error of the product, so a fused product would give another result.
        counts.push_back(rounded_product(weight, step));
      }
      const std::size_t found = trackbed::blend_loops_at(best).largest_error(weights.data(), counts.data(), size, step);
      largest.add(std::vector<std::size_t>{found});
    }
  }
  check_golden("greedy_blend", greedy, 0x12eca2343f4fb2bb);
  check_golden("exhaustive_blend", exhaustive, 0x26caccf0fbc222e6);
  check_golden("largest_error", largest, 0x9b85a68c78294d25);

  Golden rows;
  Golden narrowed;
  for (int round = 0; round < 100; ++round) {
    std::vector<std::int32_t> lengths(40);
    std::vector<std::int64_t> visits(120);
    for (std::int32_t& length : lengths) {
      length = random.below(4) == 0 ? 0 : static_cast<std::int32_t>(random.below(500));
    }
    for (std::int64_t& visit : visits) {
      visit = static_cast<std::int64_t>(random.below(lengths.size()));
    }
    rows.add(run_sample_index<std::int32_t, std::int32_t>(lengths, visits, 300, 128, round % 2));
    rows.add(run_sample_index<std::int64_t, std::int64_t>(lengths, visits, 300, 128, round % 2));
    const std::vector<std::int64_t> tokens = make_tokens<std::int64_t, std::uint16_t>(random, 40);
    std::vector<std::uint16_t> stored(tokens.size());
    const std::size_t first = trackbed::narrow<std::int64_t, std::uint16_t>(tokens, stored);
    narrowed.add(std::vector<std::size_t>{first});
    narrowed.add(std::span(stored).first(first));
  }
  check_golden("sample_index", rows, 0x26c55dc8f922e8dd);
  check_golden("narrow", narrowed, 0x6da058d86c24d9d7);

  Golden permuted;
  for (std::size_t round = 0; round < 200; ++round) {
    const std::uint64_t size = size_of_permutation(random, round);
    const std::vector<std::int64_t> positions = make_positions(random, size, 100);
    permuted.add(run_permute(size, random.next(), positions, best));
  }
  for (std::size_t round = 1; round < 100; ++round) {
    permuted.add(naive_blocks(10 * round, random.next(), 1 + round % 7, 1 + round % 5));
  }
  check_golden("permute", permuted, 0x5e3efc1ae5f07916);

  Golden located;
  for (std::size_t round = 1; round <= 50; ++round) {
    const MadeTrees trees = make_trees(random, round, 1 + round % 4, 300);
    const auto permutations = make_permutations(random, round);
    const auto keys = make_keys(random, round);
    const Located found =
        run_locate(trees, permutations, keys, make_positions(random, 2000, 300), 1 + round % 2 * 8, 3);
    located.add(found.datasets);
    located.add(found.draws);
    located.add(found.samples);
  }
  check_golden("instant_locate", located, 0x05fe054de127ad47);
}

// ---------------------------------------------------------------- packs

// Number of packs of items that are packed one by one, the longest first, each into the least room in which it fits.
std::size_t pack_one_by_one(std::span<const std::uint64_t> counts, std::uint64_t most_items) {
  struct Pack {
    std::size_t room;
    std::uint64_t items;
  };
  const std::size_t capacity = counts.size() - 1;
  std::vector<Pack> packs;
  for (std::size_t length = capacity; length > 0; --length) {
    for (std::uint64_t item = 0; item < counts[length]; ++item) {
      Pack* best = nullptr;
      for (Pack& pack : packs) {
        if (pack.room >= length && pack.items < most_items && (best == nullptr || pack.room < best->room)) {
          best = &pack;
        }
      }
      if (best == nullptr) {
        best = &packs.emplace_back(Pack{capacity, 0});
      }
      best->room -= length;
      ++best->items;
    }
  }
  return packs.size();
}

struct PackCase {
  trackbed::PackShape shape;
  std::vector<std::int32_t> lengths;
  std::vector<std::uint64_t> counts;
  std::vector<std::uint64_t> first_items;
  std::vector<std::uint32_t> documents;
  trackbed::PackPlan plan;

  trackbed::PackTables tables() const { return {plan.nodes, plan.leaves, first_items, documents, lengths}; }
};

PackCase make_pack_case(Random& random) {
  PackCase made;
  const std::uint64_t multiple = 1 + random.below(4);
  made.shape = {multiple * (1 + random.below(40)), multiple, static_cast<trackbed::LongDocuments>(random.below(3))};
  const std::size_t most = random.below(3) == 0 ? 4 * made.shape.sequence_length : 3 + made.shape.sequence_length / 2;
  made.lengths.resize(random.below(120));
  for (std::int32_t& length : made.lengths) {
    length = static_cast<std::int32_t>(random.below(most));
  }
  made.counts.resize(made.shape.sequence_length / multiple + 1);
  trackbed::count_items(made.lengths, made.shape, made.counts);
  made.first_items.assign(1, 0);
  for (const std::uint64_t count : made.counts) {
    made.first_items.push_back(made.first_items.back() + count);
  }
  made.documents.resize(made.first_items.back());
  trackbed::sort_items(made.lengths, made.shape, made.counts, made.documents);
  const std::uint64_t most_items = random.below(2) == 0 ? 1 + random.below(5) : 1000;
  made.plan = trackbed::plan_packs(made.counts, most_items);
  check(made.plan.num_packs == pack_one_by_one(made.counts, most_items), "packs as many as one by one");
  return made;
}

void test_packing(std::size_t rounds) {
  Random random(2024);
  for (std::size_t round = 0; round < rounds; ++round) {
    const PackCase made = make_pack_case(random);
    const std::uint64_t key = random.next();
    std::vector<trackbed::PackedPiece> all;
    bool fits = true;
    for (std::uint64_t pack = 0; pack < made.plan.num_packs; ++pack) {
      const std::size_t first = all.size();
      trackbed::find_pack(made.tables(), made.shape, pack, key, all);
      std::uint64_t places = 0;
      for (std::size_t piece = first; piece < all.size(); ++piece) {
        const auto own = static_cast<std::uint64_t>(all[piece].stop - all[piece].start);
        places += (own + made.shape.multiple - 1) / made.shape.multiple * made.shape.multiple;
      }
      fits = fits && all.size() > first && places <= made.shape.sequence_length;
    }
    check(fits, "packs are not empty, and within their length");
    std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> found;
    std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> wanted;
    for (const trackbed::PackedPiece& piece : all) {
      found.emplace_back(piece.document, piece.start, piece.stop);
    }
    const auto length = static_cast<std::int64_t>(made.shape.sequence_length);
    for (std::size_t document = 0; document < made.lengths.size(); ++document) {
      const std::int64_t places = made.lengths[document] - 1;
      const bool is_split = made.shape.long_documents == trackbed::LongDocuments::kSplit;
      const bool is_dropped = made.shape.long_documents == trackbed::LongDocuments::kDrop && places > length;
      for (std::int64_t start = 0; start < places && !is_dropped && (start == 0 || is_split); start += length) {
        wanted.emplace_back(static_cast<std::int64_t>(document), start, std::min(places, start + length));
      }
    }
    std::sort(found.begin(), found.end());
    check(found == wanted, "each piece is in one pack, round " + std::to_string(round));
  }
}

// Costs of packs are those of their pieces, and are dealt so that ranks lie no further apart than the widest turn.
void test_pack_borders(std::size_t rounds) {
  Random random(78);
  for (std::size_t round = 0; round < rounds; ++round) {
    const std::size_t packs = random.below(4);
    const std::size_t width = 1 + random.below(6);
    std::array<std::vector<std::int32_t>, 3> rows;
    std::array<std::vector<std::int32_t>, 3> wanted{{{0}, {0}, {0}}};
    for (std::size_t pack = 0; pack < packs; ++pack) {
      const std::size_t segments = random.below(width);
      std::array<std::int32_t, 3> sums{};
      std::array<std::int32_t, 3> before{wanted[0].back(), wanted[1].back(), wanted[2].back()};
      for (std::size_t i = 0; i < width; ++i) {
        const bool has_more = i > 0 && i <= segments;
        for (std::size_t row = 0; row < 3; ++row) {
          sums[row] += has_more ? static_cast<std::int32_t>(random.below(9) + (row == 1 ? 1 : 0)) : 0;
          rows[row].push_back(sums[row]);
          if (has_more) {
            wanted[row].push_back(before[row] + sums[row]);
          }
        }
      }
    }
    const bool keeps_all = random.below(2) == 1;
    const trackbed::JoinedBorders found =
        trackbed::join_borders({{rows[0], rows[1], rows[2]}, packs, width}, keeps_all);
    std::vector<std::int32_t> joined;
    for (std::vector<std::int32_t>& row : wanted) {
      row.resize(keeps_all ? 1 + packs * (width - 1) : row.size(), row.back());
      joined.insert(joined.end(), row.begin(), row.end());
    }
    joined.push_back(0);
    check(found.borders == joined && found.num_places == wanted[1].back(), "borders of packs are joined end to end");
  }
}

void test_pack_balance(std::size_t rounds) {
  Random random(77);
  for (std::size_t round = 0; round < rounds; ++round) {
    const PackCase made = make_pack_case(random);
    const std::uint64_t linear = 12 * (1 + random.below(5000));
    std::vector<std::int64_t> of_leaves(made.plan.leaves.size());
    trackbed::leaf_costs(made.plan.nodes, made.plan.leaves, made.shape.multiple, linear, of_leaves);
    std::vector<std::uint64_t> first_packs;
    for (const trackbed::PackLeaf& leaf : made.plan.leaves) {
      first_packs.push_back(leaf.first_pack);
    }
    std::vector<std::uint64_t> numbers(made.plan.num_packs);
    std::iota(numbers.begin(), numbers.end(), std::uint64_t{0});
    std::vector<std::int64_t> costs(numbers.size());
    trackbed::find_costs(first_packs, of_leaves, numbers, costs);
    for (const std::uint64_t pack : numbers) {
      std::vector<trackbed::PackedPiece> pieces;
      trackbed::find_pack(made.tables(), made.shape, pack, round, pieces);
      std::uint64_t wanted = 0;
      for (const trackbed::PackedPiece& piece : pieces) {
        const auto own = static_cast<std::uint64_t>(piece.stop - piece.start);
        const std::uint64_t places = (own + made.shape.multiple - 1) / made.shape.multiple * made.shape.multiple;
        wanted += linear * places + places * places;
      }
      check(costs[pack] == static_cast<std::int64_t>(wanted), "the cost of a pack is that of its pieces");
    }
    const std::size_t num_ranks = 1 + random.below(5);
    costs.resize(costs.size() / num_ranks * num_ranks);
    std::vector<std::int64_t> dealt(costs.size());
    trackbed::deal_packs(costs, num_ranks, dealt);
    std::vector<std::int64_t> loads(num_ranks, 0);
    std::int64_t widest = 0;
    for (std::size_t first = 0; first < dealt.size(); first += num_ranks) {
      std::vector<std::int64_t> turn;
      for (std::size_t rank = 0; rank < num_ranks; ++rank) {
        turn.push_back(costs[static_cast<std::size_t>(dealt[first + rank])]);
        loads[rank] += turn.back();
      }
      const auto [least, most] = std::minmax_element(turn.begin(), turn.end());
      widest = std::max(widest, *most - *least);
    }
    const auto [least, most] = std::minmax_element(loads.begin(), loads.end());
    check(*most - *least <= widest, "ranks lie no further apart than the widest turn");
    std::sort(dealt.begin(), dealt.end());
    for (std::size_t number = 0; number < dealt.size(); ++number) {
      check(dealt[number] == static_cast<std::int64_t>(number), "each pack is dealt once");
    }
  }
}

// Packs of random pieces and tables, most of which do not exist: everything is refused, absent or inside the files.
void test_packs_of_lies(std::size_t rounds) {
  Random random(77);
  trackbed::Workers workers;
  trackbed::Poll poll([](std::int64_t) {});
  for (std::size_t round = 0; round < rounds; ++round) {
    const std::size_t num_documents = 1 + random.below(8);
    std::vector<std::int32_t> lengths(num_documents);
    std::vector<std::int64_t> pointers(num_documents);
    std::int64_t size = 0;
    for (std::size_t document = 0; document < num_documents; ++document) {
      lengths[document] = static_cast<std::int32_t>(random.below(30));
      pointers[document] = random.below(20) == 0 ? static_cast<std::int64_t>(random.next()) : size;
      size += 2 * lengths[document];
    }
    std::vector<std::byte> tokens(static_cast<std::size_t>(size));
    const trackbed::TokenFile file{random.below(20) == 0 ? nullptr : tokens.data(),
                                   size,
                                   reinterpret_cast<const std::byte*>(lengths.data()),
                                   reinterpret_cast<const std::byte*>(pointers.data()),
                                   static_cast<std::int64_t>(num_documents),
                                   0,
                                   0,
                                   size};
    trackbed::SampleSource source{};
    source.num_files = 1;
    source.dtype = 8;
    std::vector<std::uint64_t> firsts(num_documents + 1);
    std::vector<std::uint32_t> runs(2 * random.below(12));
    for (std::uint64_t& first : firsts) {
      first = random.below(30) == 0 ? random.next() : random.below(runs.size() / 2 + 1);
    }
    std::sort(firsts.begin(), firsts.end() - (random.below(2) == 0 ? 1 : 0));
    for (std::uint32_t& number : runs) {
      number = static_cast<std::uint32_t>(random.below(4) == 0 ? random.next() : random.below(40));
    }
    const bool has_runs = random.below(2) == 0;
    const trackbed::TrainedRuns trained{has_runs ? firsts.data() : nullptr, runs.data(),
                                        static_cast<std::int64_t>(num_documents),
                                        static_cast<std::int64_t>(runs.size() / 2)};
    const std::int64_t context = random.below(2) == 0 ? 1 : 2;
    const trackbed::PackedShape shape{32, context == 1 ? 1 : 4, 10,
                                      static_cast<std::int64_t>(random.below(static_cast<std::size_t>(context))),
                                      context};
    std::vector<trackbed::PackedPiece> pieces;
    std::vector<std::int64_t> bounds{0};
    std::vector<std::int32_t> datasets;
    for (std::size_t pack = 0; pack < 3; ++pack) {
      for (std::size_t piece = random.below(4); piece > 0; --piece) {
        const std::size_t document = random.below(num_documents + (random.below(20) == 0 ? 2 : 0));
        const auto start = static_cast<std::int64_t>(random.below(6));
        const bool is_wild = random.below(20) == 0;
        pieces.push_back({static_cast<std::int64_t>(document), is_wild ? -start : start,
                          start + static_cast<std::int64_t>(random.below(12))});
      }
      bounds.push_back(static_cast<std::int64_t>(pieces.size()));
      datasets.push_back(random.below(30) == 0 ? 1 : 0);
    }
    const auto places = static_cast<std::size_t>(3 * shape.length / context);
    const auto borders = static_cast<std::size_t>(3 * shape.borders);
    std::vector<std::int64_t> ids(places), labels(places), positions(places);
    std::vector<float> mask(places);
    std::vector<std::uint8_t> padding(places);
    std::vector<std::int32_t> logical(borders), padded(borders), longest(3), trained_sums(borders);
    std::vector<std::int64_t> trained_tokens(3), trained_documents(3);
    const trackbed::PackedRows rows{ids.data(),
                                    labels.data(),
                                    mask.data(),
                                    positions.data(),
                                    padding.data(),
                                    logical.data(),
                                    padded.data(),
                                    longest.data(),
                                    trained_sums.data(),
                                    trained_tokens.data(),
                                    trained_documents.data()};
    for (const Isa level : levels()) {
      const trackbed::Gathered found = trackbed::gather_packs({&source, 1}, {{&file, 1}, {}}, {&trained, 1}, datasets,
                                                              pieces, bounds, shape, rows, level, 2, workers, poll);
      if (found.refused < 3 || !found.absent.empty() || !found.missing.empty()) {
        continue;
      }
      for (std::size_t pack = 0; pack < 3; ++pack) {
        const auto last = pack * 10 + 9;
        check(padded[last] == shape.length && logical[last] <= shape.length, "borders of packs end at their length");
        check(trained_sums[last] == trained_tokens[pack] && trained_tokens[pack] <= logical[last] &&
                  trained_documents[pack] <= std::min<std::int64_t>(trained_tokens[pack], 3),
              "trained labels of packs are at most their places");
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool is_short = argc > 1 && std::strcmp(argv[1], "short") == 0;
  const std::size_t scale = is_short ? 1 : 10;
  std::printf("levels up to %s\n", name_of(trackbed::best_isa()).c_str());
  test_largest_error(400 * scale);
  test_largest_error_in_every_lane();
  test_a_level_that_the_build_lacks_is_the_baseline();
  test_greedy_blend(400 * scale);
  test_exhaustive_blend(200 * scale);
  test_sample_index(400 * scale);
  test_sample_index_counts_in_64_bits();
  test_sample_index_in_threads(is_short ? 70'000 : 300'000);
  test_mapping(200 * scale);
  test_sieve(100 * scale);
  test_draw(120 * scale);
  test_legacy_shuffle(5 * scale);
  test_wide_draws();
  test_run_parallel();
  test_narrow(41 * scale);
  test_count_tokens(200 * scale);
  test_small_indices(200 * scale);
  test_permutation(400 * scale);
  test_block_permutation(200 * scale);
  test_permutation_of_many_positions();
  test_draw_phases(50 * scale);
  test_interleaving(50 * scale);
  test_ramps(20 * scale);
  test_instant_order_in_blocks(20 * scale);
  test_instant_order_on_threads();
  test_workers();
  test_gather(150 * scale);
  test_gather_of_lies(300 * scale);
  test_packing(200 * scale);
  test_pack_borders(500 * scale);
  test_pack_balance(200 * scale);
  test_packs_of_lies(300 * scale);
  test_masked(300 * scale);
  test_masked_lies(400 * scale);
  test_sum_ranks(30 * scale);
  test_square_sum(20 * scale);
  test_threads(2 * scale);
  test_golden();
  std::printf("%ld passed, %ld failed\n", passed.load(), failed.load());
  return failed == 0 ? 0 : 1;
}
