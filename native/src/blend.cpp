#include "trackbed/blend.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>
#include <vector>

#include "trackbed/blend_loops.hpp"

namespace trackbed {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();    // count of datasets that are not drawn again
constexpr double kEverybody = std::numeric_limits<double>::lowest();  // a threshold that all errors reach
constexpr std::size_t kResident = 64;                                 // largest number of datasets without a sieve
constexpr std::size_t kBlock = 16;                                    // steps drawn from one list of candidates
constexpr std::size_t kFew = 8;                                       // equal datasets that are always candidates
constexpr std::size_t kLongest = 512;
constexpr std::size_t kPollSteps = 4096;
constexpr double kHopeless = 1e6;  // widening after which a threshold is given up

// All datasets, or those that passed a sieve. `at` is their index in the list that was sieved.
struct Entries {
  explicit Entries(std::size_t room)
      : weights(room + BlendLoops::kPadding, 0.0),
        counts(room + BlendLoops::kPadding, kNever),
        at(room + BlendLoops::kPadding),
        is_last(room + BlendLoops::kPadding, 0) {}

  std::size_t size = 0;
  std::vector<double> weights;
  std::vector<double> counts;
  std::vector<std::int32_t> at;
  bool is_thinned = false;            // true if thin_out() left out datasets equal to one of the entries
  std::vector<std::uint8_t> is_last;  // if so: 1 for entries after whose draw those datasets are next
};

// The smallest recent winning error, over the current period and the previous one.
class Lowest {
 public:
  void note(double error) { present_ = std::min(present_, error); }
  double turn() {
    const double both = std::min(present_, before_);
    before_ = present_;
    present_ = kNever;
    return both;
  }

 private:
  double present_ = kNever;
  double before_ = kNever;
};

// Datasets of one class and count that were kept by one call of thin_out().
struct Kept {
  double count = kNever;
  std::size_t number = 0;
  std::size_t last = 0;  // entry of the last one
};

// Datasets of one class that were kept by one call of thin_out(). Counts in a class usually differ by at most 1, so two
// counts are tracked; datasets with other counts are always kept.
struct Seen {
  std::uint64_t thinning = 0;
  Kept kept[2];

  Kept* of(double count, std::uint64_t present) {
    if (thinning != present) {
      *this = Seen{present, {{count, 0, 0}, {}}};
    }
    if (count == kept[0].count) {
      return &kept[0];
    }
    if (kept[1].count == kNever) {
      kept[1].count = count;
    }
    return count == kept[1].count ? &kept[1] : nullptr;
  }
};

// Classes of datasets with equal weights, numbered from 1; 0 for datasets with a unique weight. Empty if all weights
// are unique.
std::vector<std::int32_t> classes_of(std::span<const double> weights) {
  std::unordered_map<double, std::int32_t> first_of;
  std::vector<std::int32_t> classes(weights.size(), 0);
  std::int32_t num_classes = 0;
  for (std::size_t dataset = 0; dataset < weights.size(); ++dataset) {
    const auto [known, is_new] = first_of.try_emplace(weights[dataset], static_cast<std::int32_t>(dataset));
    if (!is_new) {
      std::int32_t& its_class = classes[static_cast<std::size_t>(known->second)];
      its_class = its_class == 0 ? ++num_classes : its_class;
      classes[dataset] = its_class;
    }
  }
  return num_classes == 0 ? std::vector<std::int32_t>{} : classes;
}

// State of a blend. With kLimited each dataset is drawn at most sizes[d] times.
//
// Only few datasets can win in the next steps, so the candidates are sieved. Errors grow until their dataset is drawn.
// At the last step of a block, the error of every dataset that wins inside the block would therefore be at least the
// smallest winning error of the block. A threshold for that error is guessed from earlier blocks, and datasets whose
// error will not reach it are left out. If no candidate reaches the threshold at some step, the guess was too high, and
// it is lowered before that step is drawn. There are two such lists: a warm one for many steps and, sieved from it, a
// hot one for a few. The draws are those of the plain rule for any guesses.
template <class Id, bool kLimited>
class Blend {
 public:
  Blend(std::span<const double> weights, std::span<const std::int64_t> sizes, std::span<Id> dataset_index,
        std::span<std::int64_t> dataset_sample_index, Isa level, Poll& poll)
      : sizes_(sizes),
        dataset_index_(dataset_index),
        dataset_sample_index_(dataset_sample_index),
        loops_(blend_loops_at(level)),
        poll_(poll),
        all_(weights.size()) {
    all_.size = weights.size();
    std::copy(weights.begin(), weights.end(), all_.weights.begin());
    std::fill_n(all_.counts.begin(), weights.size(), 0.0);
  }

  void run() {
    const auto weights = std::span(all_.weights).first(all_.size);
    if (dataset_index_.empty()) {
      return;
    }
    const auto [lowest, highest] = std::minmax_element(weights.begin(), weights.end());
    if (*lowest == *highest && std::abs(*lowest) * static_cast<double>(dataset_index_.size()) < 0x1p50) {
      draw_in_turn();
      return;
    }
    draw_plainly(1);  // steps 0 and 1 both count as 1
    if (*lowest < 0.0) {
      draw_plainly(dataset_index_.size());
    } else if (all_.size <= kResident) {
      draw_resident();
    } else {
      draw_sieved();
    }
  }

 private:
  // Writes sample `next_`: number `count` of `dataset`. Returns the new count of the dataset.
  double take(std::size_t dataset, double count) {
    dataset_index_[next_] = static_cast<Id>(dataset);
    dataset_sample_index_[next_] = static_cast<std::int64_t>(count);
    ++next_;
    if constexpr (kLimited) {
      if (static_cast<std::int64_t>(count) + 1 == sizes_[dataset]) {
        return kNever;
      }
    }
    return count + 1.0;
  }

  // Datasets of equal weight are drawn round-robin: the next one is the first of those drawn least, as long as counts
  // are exact in doubles.
  void draw_in_turn() {
    while (next_ < dataset_index_.size()) {
      const double count = all_.counts[0];
      const std::size_t stop = std::min(dataset_index_.size(), next_ + all_.size);
      for (std::size_t dataset = 0; next_ < stop; ++dataset) {
        take(dataset, count);
      }
      all_.counts[0] = count + 1.0;
      if (next_ % kPollSteps < all_.size) {
        poll_(static_cast<std::int64_t>(next_));
      }
    }
  }

  double step() const { return std::max(static_cast<double>(next_), 1.0); }

  void draw_plainly(std::size_t stop) {
    while (next_ < stop) {
      const std::size_t dataset = loops_.largest_error(all_.weights.data(), all_.counts.data(), all_.size, step());
      all_.counts[dataset] = take(dataset, all_.counts[dataset]);
      if (next_ % 256 == 0) {
        poll_(static_cast<std::int64_t>(next_));
      }
    }
  }

  // Few datasets: all are candidates in every step.
  void draw_resident() {
    std::vector<double> ahead(all_.counts.size());
    while (next_ < dataset_index_.size()) {
      std::copy(all_.counts.begin(), all_.counts.end(), ahead.begin());
      const std::size_t num_steps = std::min(kLongest, dataset_index_.size() - next_);
      const std::size_t drawn =
          loops_.draw(all_.weights.data(), ahead.data(), all_.size, step(), num_steps, kEverybody, drawn_, &ignored_);
      for (std::size_t k = 0; k < drawn; ++k) {
        double& count = all_.counts[drawn_[k]];
        if (kLimited && count == kNever) {
          break;  // the dataset is used up: the rest of the block must be drawn without it
        }
        count = take(drawn_[k], count);
      }
      poll_(static_cast<std::int64_t>(next_));
    }
  }

  void draw_sieved() {
    classes_ = classes_of(std::span<const double>(all_.weights).first(all_.size));
    seen_.resize(classes_.empty() ? 0 : all_.size + 1);
    const double margin = 4.0 / static_cast<double>(all_.size);
    const std::size_t horizon =
        std::max<std::size_t>(kBlock, static_cast<std::size_t>(4.5 * std::sqrt(static_cast<double>(all_.size))));
    Entries warm(all_.size);
    Entries hot(all_.size);
    double warm_threshold = kEverybody;
    double hot_threshold = kEverybody;
    Lowest warm_lowest;
    Lowest hot_lowest;
    double widening = 1.0;          // next decrement of a threshold, in margins; doubled after each failure
    std::size_t blocks = 0;         // successful blocks since the hot threshold was set
    std::size_t most_equal = kFew;  // limit of equal datasets in the warm list
    std::size_t warm_stop = next_;
    while (next_ < dataset_index_.size()) {
      if (next_ == warm_stop) {
        give_back(warm);
        warm_stop = std::min(dataset_index_.size(), next_ + horizon);
        sieve(all_, static_cast<double>(warm_stop - 1), warm_threshold, warm);
        thin_out(warm, most_equal);
        hot_threshold = std::max(hot_threshold, warm_threshold);
        poll_(static_cast<std::int64_t>(next_));
      }
      const std::size_t stop = std::min(warm_stop, next_ + kBlock);
      sieve(warm, static_cast<double>(stop - 1), hot_threshold, hot);
      if (most_equal > kBlock) {
        thin_out(hot, kBlock, &warm);
      }
      double lowest = kNever;
      const std::size_t num_steps = stop - next_;
      const std::size_t drawn = hot.size == 0 ? 0
                                              : loops_.draw(hot.weights.data(), hot.counts.data(), hot.size, step(),
                                                            num_steps, hot_threshold, drawn_, &lowest);
      bool ended = false;    // a dataset was drawn again after its last draw
      bool used_up = false;  // all warm datasets of an equal group were drawn: the others of the group are next
      for (std::size_t k = 0; k < drawn && !ended && !used_up; ++k) {
        const auto entry = static_cast<std::size_t>(hot.at[drawn_[k]]);
        double& count = warm.counts[entry];
        ended = kLimited && count == kNever;
        if (!ended) {
          count = take(static_cast<std::size_t>(warm.at[entry]), count);
          used_up = warm.is_thinned && warm.is_last[entry] != 0;
        }
      }
      warm_lowest.note(lowest);
      hot_lowest.note(lowest);
      if (used_up) {
        most_equal = std::min(horizon, 2 * most_equal);
        warm_stop = next_;
      } else if (drawn < num_steps && !ended) {
        // No hot dataset reaches the threshold, so none is proven to win.
        if (hot_threshold <= warm_threshold) {
          warm_threshold = widening > kHopeless ? kEverybody : warm_threshold - 5.0 * margin * widening;
          hot_threshold = warm_threshold;
          warm_stop = next_;
        } else {
          hot_threshold =
              widening > kHopeless ? warm_threshold : std::max(warm_threshold, hot_threshold - 2.0 * margin * widening);
        }
        widening *= 2.0;
        hot_lowest.note(hot_threshold + margin);
        warm_lowest.note(hot_threshold + margin);
        continue;
      }
      widening = 1.0;
      if (++blocks == 8) {
        blocks = 0;
        hot_threshold = std::max(warm_threshold, hot_lowest.turn() - margin);
      }
      if (next_ == warm_stop) {
        warm_threshold = std::max(kEverybody, warm_lowest.turn() - 5.0 * margin);
        most_equal = used_up ? most_equal : std::max(kFew, most_equal - most_equal / 8);
      }
    }
  }

  // Copies the entries of `from` that may win in the steps up to `step` to `to`.
  void sieve(const Entries& from, double step, double threshold, Entries& to) {
    to.size = loops_.sieve(from.weights.data(), from.counts.data(), from.size, step, threshold, to.weights.data(),
                           to.counts.data(), to.at.data());
  }

  // Keeps `most` of each group of datasets with equal weights and counts, and marks the last one kept. The first
  // dataset of a group is drawn first, so the others cannot win before it. Otherwise all datasets of a blend with equal
  // weights would always be hot.
  void thin_out(Entries& entries, std::size_t most, const Entries* from = nullptr) {
    entries.is_thinned = false;
    if (classes_.empty()) {
      return;
    }
    ++thinning_;
    std::size_t kept = 0;
    for (std::size_t entry = 0; entry < entries.size; ++entry) {
      const auto number = static_cast<std::size_t>(entries.at[entry]);
      const auto its_class =
          static_cast<std::size_t>(classes_[from == nullptr ? number : static_cast<std::size_t>(from->at[number])]);
      Kept* equal = its_class == 0 ? nullptr : seen_[its_class].of(entries.counts[entry], thinning_);
      if (equal != nullptr && equal->number == most) {
        entries.is_last[equal->last] = 1;
        entries.is_thinned = true;
        continue;
      }
      if (equal != nullptr) {
        ++equal->number;
        equal->last = kept;
      }
      entries.is_last[kept] = 0;
      if (entry > kept) {
        entries.weights[kept] = entries.weights[entry];
        entries.counts[kept] = entries.counts[entry];
        entries.at[kept] = entries.at[entry];
      }
      ++kept;
    }
    for (std::size_t entry = kept; entry < entries.size; ++entry) {
      entries.weights[entry] = 0.0;
      entries.counts[entry] = kNever;
    }
    entries.size = kept;
  }

  // Copies the counts of the warm list back to the list of all datasets.
  void give_back(const Entries& warm) {
    for (std::size_t entry = 0; entry < warm.size; ++entry) {
      all_.counts[static_cast<std::size_t>(warm.at[entry])] = warm.counts[entry];
    }
  }

  std::span<const std::int64_t> sizes_;
  std::span<Id> dataset_index_;
  std::span<std::int64_t> dataset_sample_index_;
  const BlendLoops loops_;
  Poll& poll_;
  Entries all_;
  std::size_t next_ = 0;  // next sample to draw
  std::vector<std::int32_t> classes_;
  std::vector<Seen> seen_;
  std::uint64_t thinning_ = 0;
  std::uint32_t drawn_[kLongest];
  double ignored_ = kNever;
};

}  // namespace

template <class Id>
void greedy_blend(std::span<const double> weights, std::span<Id> dataset_index,
                  std::span<std::int64_t> dataset_sample_index, Isa level, Poll& poll) {
  Blend<Id, false>(weights, {}, dataset_index, dataset_sample_index, level, poll).run();
}

template <class Id>
void exhaustive_blend(std::span<const std::int64_t> sizes, std::span<Id> dataset_index,
                      std::span<std::int64_t> dataset_sample_index, Isa level, Poll& poll) {
  const auto total = static_cast<double>(dataset_index.size());
  std::vector<double> weights(sizes.size());
  std::transform(sizes.begin(), sizes.end(), weights.begin(),
                 [total](std::int64_t size) { return static_cast<double>(size) / total; });
  Blend<Id, true>(weights, sizes, dataset_index, dataset_sample_index, level, poll).run();
}

#define TRACKBED_BLEND(Id)                                                                                 \
  template void greedy_blend(std::span<const double>, std::span<Id>, std::span<std::int64_t>, Isa, Poll&); \
  template void exhaustive_blend(std::span<const std::int64_t>, std::span<Id>, std::span<std::int64_t>, Isa, Poll&);

TRACKBED_BLEND(std::int16_t)
TRACKBED_BLEND(std::int32_t)

}  // namespace trackbed
