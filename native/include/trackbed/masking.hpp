#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "trackbed/numpy_random.hpp"

namespace trackbed {

// What decides a masked sample, in 64-bit words.
struct MaskingRules {
  std::int64_t is_t5;           // 1 for samples of T5, 0 for those of BERT
  std::int64_t length;          // S, tokens of a sample; of T5's encoder
  std::int64_t decoder_length;  // D, tokens of T5's decoder
  std::int64_t seed;            // that of sample k is (seed + k) mod 2^32
  std::int64_t pad;             // padding of short samples, replaced by 0
  std::int64_t cls;             // ids of special tokens; cls and sep are never masked
  std::int64_t sep;
  std::int64_t mask;
  std::int64_t bos;  // T5 only, as eos
  std::int64_t eos;
  std::int64_t has_segments;  // 1 if BERT's sentences are divided into two segments, which may be swapped
  std::int64_t full_words;    // 1 if words are masked, 0 if tokens are
  std::int64_t is_geometric;  // 1 if numbers of words are drawn from a geometric distribution
  std::int64_t permutes;      // 1 if other tokens are permuted
  double probability;         // share of the tokens that is masked
  const double* cumulative;   // cumulative probabilities of 1, 2, ... words
  std::int64_t max_ngram;     // most words that are masked together, at least 1
  const std::uint8_t* kinds;  // Kind of each token id
  std::int64_t num_kinds;
  const std::int64_t* listed;     // ids from which a random token is drawn
  std::int64_t num_listed;        // below 2^32
  const std::int64_t* sentinels;  // ids that replace spans, T5 only
  std::int64_t num_sentinels;
};

// Kinds of token ids; ids beyond the table are unknown.
enum class Kind : std::uint8_t { starts, continues, unknown };

// Positions of an n-gram that was masked: [first, stop) of Masking::positions().
struct MaskedSpan {
  std::size_t first;
  std::size_t stop;
};

// Masks the tokens of one sample after another; see src/trackbed/datasets/masked/masking.py for the algorithm in
// Python.
class Masking {
 public:
  explicit Masking(const MaskingRules& rules) : rules_(rules) {}

  // Masks some of `tokens` in place. Returns false, with undefined tokens, if an id is unknown.
  // Requires: fewer than 2^32 tokens. O(tokens).
  bool mask(std::span<std::int64_t> tokens, std::int64_t target_length, NumpyRandom& random);

  // Positions of the tokens that are not special, in increasing order.
  std::span<const std::uint32_t> positions() const { return positions_; }

  // The n-grams that were masked, in the order of their first positions.
  std::span<const MaskedSpan> spans() const { return spans_; }

  // For each position: whether it has a label, because its token was masked or permuted.
  std::span<const std::uint8_t> is_labelled() const { return is_labelled_; }

  // For each position that has one, its label.
  std::span<const std::int64_t> labels() const { return labels_; }

 private:
  bool find_words(std::span<const std::int64_t> tokens);
  std::size_t draw_words(NumpyRandom& random) const;
  std::int64_t draw_mask(std::int64_t token, NumpyRandom& random) const;
  void permute(std::span<std::int64_t> tokens, double most, NumpyRandom& random);

  // Calls `take` with n-grams that have no position in common with each other and with labelled ones.
  template <class Take>
  void take_ngrams(double most, NumpyRandom& random, const Take& take);

  const MaskingRules& rules_;
  std::vector<std::uint32_t> positions_;
  std::vector<std::uint32_t> words_;  // index in positions_ of the first token of each word, then their number
  std::vector<std::uint32_t> order_;
  std::vector<std::uint8_t> is_labelled_;
  std::vector<std::int64_t> labels_;
  std::vector<MaskedSpan> spans_;
};

}  // namespace trackbed
