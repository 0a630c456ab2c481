#include "trackbed/masking.hpp"

#include <algorithm>
#include <cmath>

namespace trackbed {

namespace {

constexpr double kGeometric = 0.2;  // SpanBERT's parameter
constexpr double kMasked = 0.8;     // share of BERT's masked tokens that become `mask`

}  // namespace

bool Masking::find_words(std::span<const std::int64_t> tokens) {
  positions_.clear();
  words_.clear();
  for (std::size_t position = 0; position < tokens.size(); ++position) {
    const std::int64_t token = tokens[position];
    if (token == rules_.cls || token == rules_.sep) {
      continue;
    }
    const bool is_known = token >= 0 && token < rules_.num_kinds;
    const Kind kind = is_known ? static_cast<Kind>(rules_.kinds[token]) : Kind::unknown;
    if (kind == Kind::unknown) {
      return false;
    }
    // A piece that follows a special token joins the word before it, as in Megatron Core.
    if (kind != Kind::continues || rules_.full_words == 0 || words_.empty()) {
      words_.push_back(static_cast<std::uint32_t>(positions_.size()));
    }
    positions_.push_back(static_cast<std::uint32_t>(position));
  }
  order_.resize(words_.size());
  for (std::size_t word = 0; word < order_.size(); ++word) {
    order_[word] = static_cast<std::uint32_t>(word);
  }
  words_.push_back(static_cast<std::uint32_t>(positions_.size()));
  return true;
}

std::size_t Masking::draw_words(NumpyRandom& random) const {
  const auto most = static_cast<std::size_t>(rules_.max_ngram);
  if (rules_.is_geometric != 0) {
    return static_cast<std::size_t>(std::clamp(random.geometric(kGeometric), 1.0, static_cast<double>(most)));
  }
  return std::min(1 + random.choice({rules_.cumulative, most}), most);
}

std::int64_t Masking::draw_mask(std::int64_t token, NumpyRandom& random) const {
  if (rules_.is_t5 != 0 || random.random() < kMasked) {
    return rules_.mask;
  }
  if (random.is_below_half()) {
    return token;
  }
  return rules_.listed[random.up_to(static_cast<std::uint32_t>(rules_.num_listed - 1))];
}

template <class Take>
void Masking::take_ngrams(double most, NumpyRandom& random, const Take& take) {
  std::size_t taken = 0;
  const auto fits = [&](std::size_t count) { return static_cast<double>(taken + count) <= most; };
  for (const std::uint32_t word : order_) {
    if (static_cast<double>(taken) >= most) {
      return;
    }
    std::size_t count = draw_words(random);
    const std::size_t first = words_[word];
    const auto stop_of = [&](std::size_t num_words) {
      return words_[std::min<std::size_t>(word + num_words, words_.size() - 1)];
    };
    while (count > 1 && !fits(stop_of(count) - first)) {
      --count;
    }
    const std::size_t stop = stop_of(count);
    const auto is_free = [&](std::uint32_t position) { return is_labelled_[position] == 0; };
    if (fits(stop - first) && std::all_of(positions_.begin() + static_cast<std::ptrdiff_t>(first),
                                          positions_.begin() + static_cast<std::ptrdiff_t>(stop), is_free)) {
      taken += stop - first;
      take(first, stop);
    }
  }
}

void Masking::permute(std::span<std::int64_t> tokens, double most, NumpyRandom& random) {
  std::vector<std::uint32_t> permuted;
  random.shuffle(std::span(order_));
  take_ngrams(most, random, [&](std::size_t first, std::size_t stop) {
    for (std::size_t at = first; at < stop; ++at) {
      const std::uint32_t position = positions_[at];
      is_labelled_[position] = 1;
      labels_[position] = tokens[position];
      permuted.push_back(position);
    }
  });
  std::sort(permuted.begin(), permuted.end());
  std::vector<std::uint32_t> sources = permuted;
  random.shuffle(std::span(sources));
  for (std::size_t at = 0; at < permuted.size(); ++at) {
    tokens[permuted[at]] = labels_[sources[at]];
  }
}

bool Masking::mask(std::span<std::int64_t> tokens, std::int64_t target_length, NumpyRandom& random) {
  if (!find_words(tokens)) {
    return false;
  }
  const double wanted = std::nearbyint(static_cast<double>(tokens.size()) * rules_.probability);
  const double most = std::min(rules_.probability * static_cast<double>(target_length), std::max(1.0, wanted));
  is_labelled_.assign(tokens.size(), 0);
  labels_.resize(tokens.size());
  spans_.clear();
  random.shuffle(std::span(order_));
  take_ngrams(most, random, [&](std::size_t first, std::size_t stop) {
    for (std::size_t at = first; at < stop; ++at) {
      const std::uint32_t position = positions_[at];
      is_labelled_[position] = 1;
      labels_[position] = tokens[position];
      tokens[position] = draw_mask(tokens[position], random);
    }
    spans_.push_back({first, stop});
  });
  if (rules_.permutes != 0) {
    permute(tokens, most, random);
  }
  std::sort(spans_.begin(), spans_.end(),
            [](const MaskedSpan& one, const MaskedSpan& other) { return one.first < other.first; });
  return true;
}

}  // namespace trackbed
