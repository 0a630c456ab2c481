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

// Shape and contents of samples, in 64-bit words.
struct SampleShape {
  std::int64_t length;  // S, at least 1
  std::int64_t extra;   // 1 if a sample also holds the first token of the next one, else 0
  std::int64_t pad;     // padding of short samples, neither an input nor a label
  std::int64_t eod;     // end of a document, for positions, masked inputs and attention
  std::int64_t resets_positions;
  std::int64_t masks_eod;
  std::int64_t keeps_documents_apart;  // 1 for positions within documents, by the borders of cu_seqlens
  std::int64_t masks_borders;          // 1 to leave labels that begin another sequence out of the loss
};

// A batch of B samples, in 64-bit words. Arrays that are null are not written.
struct BatchRows {
  std::int64_t* tokens;          // [B, S]
  std::int64_t* labels;          // [B, S]
  float* loss_mask;              // [B, S]
  std::int64_t* position_ids;    // [B, S]
  std::uint8_t* attention_mask;  // [B, S, S], 1 where attention is masked
  std::int32_t* cu_seqlens;      // [B, S + 1]
  std::int32_t* max_seqlen;      // [B]
};

// Result of gather().
struct Gathered {
  std::int64_t refused;              // the first sample that was refused, or B
  std::vector<std::int64_t> absent;  // files that must be opened first
  std::vector<Missing> missing;      // bytes that must be fetched first, by sample
};

// Gathers a batch: sample i is at positions[i] of source datasets[i]; see plan_spans(). All samples of a source out of
// range are refused. If a sample is refused, or a file or bytes are
// missing, the rows are undefined. Rows without tokens are not written: the call finds out what is missing.
// Requires: as many datasets as positions, rows with space for as many samples, and what plan_spans() requires. Bound
// by memory bandwidth.
Gathered gather(std::span<const SampleSource> sources, const TokenFiles& files, std::span<const std::int32_t> datasets,
                std::span<const std::int64_t> positions, const SampleShape& shape, const BatchRows& rows, Isa level,
                int num_threads, Workers& workers, Poll& poll);

}  // namespace trackbed
