#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "trackbed/isa.hpp"
#include "trackbed/poll.hpp"
#include "trackbed/sample_spans.hpp"
#include "trackbed/workers.hpp"

namespace trackbed {

// What a sample is made into, in 64-bit words.
struct SampleShape {
  std::int64_t length;  // S, at least 1
  std::int64_t extra;   // 1 if a sample holds the token after its last, else 0
  std::int64_t pad;     // fills up short samples; is no input and no label
  std::int64_t eod;     // ends documents; for positions, masked inputs and attention
  std::int64_t resets_positions;
  std::int64_t masks_eod;
};

// A batch of B samples, in 64-bit words. What is null is not written.
struct BatchRows {
  std::int64_t* tokens;          // [B, S]
  std::int64_t* labels;          // [B, S]
  float* loss_mask;              // [B, S]
  std::int64_t* position_ids;    // [B, S]
  std::uint8_t* attention_mask;  // [B, S, S], 1 where attention must not look
  std::int32_t* cu_seqlens;      // [B, S + 1]
  std::int32_t* max_seqlen;      // [B]
};

// How far a batch came.
struct Gathered {
  std::int64_t refused;              // the first sample that could not be planned, or B
  std::vector<std::int64_t> absent;  // files that must be mapped first
};

// Makes a batch of the samples at `positions` of the sources that `datasets` names: see plan_spans(). If a sample is
// refused, as all of a source that is not there are, or a file is absent, the rows mean nothing.
// Requires: as many datasets as positions; rows with room for as many samples; what plan_spans() requires. Bound by
// memory.
Gathered gather(std::span<const SampleSource> sources, std::span<const TokenFile> files,
                std::span<const std::int32_t> datasets, std::span<const std::int64_t> positions,
                const SampleShape& shape, const BatchRows& rows, Isa level, int num_threads, Workers& workers,
                Poll& poll);

}  // namespace trackbed
