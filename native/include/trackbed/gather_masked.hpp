#pragma once

#include <cstdint>
#include <span>

#include "trackbed/gather.hpp"
#include "trackbed/isa.hpp"
#include "trackbed/masking.hpp"
#include "trackbed/poll.hpp"
#include "trackbed/sample_spans.hpp"
#include "trackbed/workers.hpp"

namespace trackbed {

// A batch of B masked samples, in 64-bit words. Of BERT and T5, each has the arrays named after it.
struct MaskedRows {
  std::int64_t* text;          // [B, S] BERT's tokens, or those of T5's encoder
  std::int64_t* labels;        // [B, S], or [B, D] of T5
  std::int64_t* loss_mask;     // as labels
  std::int64_t* truncated;     // [B]
  std::int64_t* types;         // [B, S] BERT
  std::int64_t* padding_mask;  // [B, S] BERT
  std::int64_t* is_random;     // [B] BERT
  std::int64_t* enc_mask;      // [B, S] T5
  std::int64_t* text_dec;      // [B, D] T5
  std::int64_t* dec_mask;      // [B, D] T5
};

// Gathers a batch: sample i is at positions[i] of source datasets[i], counted from the end if it is below 0. A sample
// is refused, too, if it has an id that is unknown, more spans than sentinels, or more tokens than the decoder.
// Rows without text are not written, as by gather(). Requires: as gather(), of sources with sentences. Bound by the
// random numbers: about 10 us a sample.
Gathered gather_masked(std::span<const SampleSource> sources, const TokenFiles& files,
                       std::span<const std::int32_t> datasets, std::span<const std::int64_t> positions,
                       const MaskingRules& rules, const MaskedRows& rows, Isa level, int num_threads, Workers& workers,
                       Poll& poll);

}  // namespace trackbed
