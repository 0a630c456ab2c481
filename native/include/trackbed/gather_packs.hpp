#pragma once

#include <cstdint>
#include <span>

#include "trackbed/gather.hpp"
#include "trackbed/isa.hpp"
#include "trackbed/poll.hpp"
#include "trackbed/sample_spans.hpp"
#include "trackbed/workers.hpp"

namespace trackbed {

// Shape of packs, in 64-bit words.
struct PackedShape {
  std::int64_t length;        // S, places of a pack
  std::int64_t multiple;      // each piece is padded to a multiple of this number of places, which divides S
  std::int64_t borders;       // entries of a row of borders: at least two more than the pieces of a pack
  std::int64_t context_rank;  // of the ranks that share a pack, the one whose places are written
  std::int64_t
      context_size;  // number of these ranks; where it is above 1, `multiple` is a multiple of 2 * context_size
};

// Runs of trained tokens of the documents of a file, in 64-bit words; all tokens are trained where `firsts` is null.
struct TrainedRuns {
  const std::uint64_t* firsts;  // runs before each document, and in all
  const std::uint32_t* runs;    // first token of each run in its document, and number of tokens
  std::int64_t num_documents;
  std::int64_t num_runs;
};

// A batch of B packs, in 64-bit words. Each piece is a segment of the pack, padded to a multiple of places; the rest of
// the pack is one more segment, without a place of its own. With several ranks in a context, each segment is cut into
// 2 * context_size equal parts, of which a rank has the one of its number and the one as far from the end, and rows
// have S / context_size places; borders and counts stay those of the whole pack.
struct PackedRows {
  std::int64_t* tokens;             // [B, S]; 0 in padding, as are labels
  std::int64_t* labels;             // [B, S]
  float* loss_mask;                 // [B, S]; 0 in padding, and where the label is not trained
  std::int64_t* position_ids;       // [B, S], from 0 on in each segment
  std::uint8_t* padding_mask;       // [B, S], 1 in padding
  std::int32_t* cu_seqlens;         // [B, borders]: 0, and the sum of places up to each segment's end, then the last
  std::int32_t* cu_seqlens_padded;  // [B, borders]: 0, the end of each segment, then S
  std::int32_t* max_seqlen;         // [B], padded length of the longest piece
  std::int32_t* cu_trained_tokens;  // [B, borders]: 0, and the sum of trained labels up to each segment's end, the last
  std::int64_t* num_trained_tokens;  // [B], trained labels of the whole pack
  std::int64_t* num_documents;       // [B], pieces with a trained label
};

// Gathers packs: sample i has pieces[firsts[i], firsts[i + 1]) of source datasets[i]. What is refused, absent or
// missing is as in gather(); so is a pack whose pieces do not fit into S places or whose `firsts` are in disorder, or
// whose runs are damaged. There are as many `trained` as files.
Gathered gather_packs(std::span<const SampleSource> sources, const TokenFiles& files,
                      std::span<const TrainedRuns> trained, std::span<const std::int32_t> datasets,
                      std::span<const PackedPiece> pieces, std::span<const std::int64_t> firsts,
                      const PackedShape& shape, const PackedRows& rows, Isa level, int num_threads, Workers& workers,
                      Poll& poll);

}  // namespace trackbed
