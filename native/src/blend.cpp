#include "trackbed/blend.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>
#include <vector>

#include "trackbed/blend_loops.hpp"

namespace trackbed {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();    // the count of what is not drawn again
constexpr double kEverybody = std::numeric_limits<double>::lowest();  // a threshold that all errors reach
constexpr std::size_t kResident = 64;                                 // so many datasets need no sieve
constexpr std::size_t kBlock = 16;                                    // steps drawn from one list of candidates
constexpr std::size_t kFew = 8;                                       // equal datasets that are always looked at
constexpr std::size_t kLongest = 512;
constexpr std::size_t kPollSteps = 4096;
constexpr double kHopeless = 1e6;  // a widening that has not helped

// Datasets, or those of them that one sieve let through. `at` is their number in the list that was sieved.
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
  bool is_thinned = false;            // whether datasets were left out that equal one that is here
  std::vector<std::uint8_t> is_last;  // if so: whether they are next as soon as this one is drawn
};

// The smallest error that won lately: over the present period and the one before.
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

// Datasets of a class, all of one count, that were kept in one thinning out.
struct Kept {
  double count = kNever;
  std::size_t number = 0;
  std::size_t last = 0;  // the last one's entry
};

// What was kept of a class in one thinning out. Inside a class counts differ by 1, as a rule: two are kept apart, and
// others are not noted.
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

// Which datasets have the same weight as others: their class, from 1 on, and 0 for those that are alone.
// Empty where all are alone.
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

// A blend being drawn. With kLimited each dataset is drawn sizes[d] times at most.
//
// Only few datasets can win soon. Errors grow until their dataset is drawn, so who wins inside a block of steps has, at
// the block's last step, an error of at least the smallest one that wins in it. That is guessed from the blocks before:
// everybody whose error will not reach the guess is left out, and if nobody in the block reaches it at some step, the
// guess was too high and is lowered before that step is drawn. This is done twice, with a list for many steps and one
// for a few. So the draws are those of the plain rule, whatever the guesses are.
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
  // Notes that the sample at `next_` is the count-th of `dataset`. Returns the dataset's count from now on.
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

  // Datasets of equal weight take turns: as long as doubles tell counts apart, the first of those drawn least is next.
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

  // Few datasets: everybody is looked at in every step.
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
          break;  // it was drawn for the last time in this block: what comes after must do without it
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
    double widening = 1.0;          // how far a threshold is lowered next, in margins: twice as far each time it fails
    std::size_t blocks = 0;         // blocks that went well since the hot threshold was set
    std::size_t most_equal = kFew;  // of equal datasets so many are warm
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
      bool ended = false;    // a dataset was drawn for the last time, and then once more
      bool used_up = false;  // all that were warm of some equal datasets were drawn: the others are next
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
        // Nobody hot is proven to win.
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

  // The entries of `from` that may win in the next steps, the last of which is `step`, in `to`.
  void sieve(const Entries& from, double step, double threshold, Entries& to) {
    to.size = loops_.sieve(from.weights.data(), from.counts.data(), from.size, step, threshold, to.weights.data(),
                           to.counts.data(), to.at.data());
  }

  // Of datasets with equal weights and counts the first is drawn first: the rest cannot win while one of those before
  // is left. So `most` of them are kept, as a blend of equal weights would otherwise always be wholly hot, and the last
  // one kept is marked.
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

  // What was drawn from the warm list, noted with everybody.
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
  std::size_t next_ = 0;  // the sample to be drawn
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
