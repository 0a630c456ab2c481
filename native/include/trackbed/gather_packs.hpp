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
  std::int64_t length;    // S, places of a pack
  std::int64_t multiple;  // each piece is padded to a multiple of so many places, which divides S
  std::int64_t borders;   // entries of a row of borders: at least two more than the pieces of a pack
};

// A batch of B packs, in 64-bit words. Each piece is a segment of the pack, padded to a multiple of places; the rest of
// the pack is one more segment, without a place of its own.
struct PackedRows {
  std::int64_t* tokens;             // [B, S]; 0 in padding, as are labels
  std::int64_t* labels;             // [B, S]
  float* loss_mask;                 // [B, S]; 0 in padding
  std::int64_t* position_ids;       // [B, S], from 0 on in each segment
  std::uint8_t* padding_mask;       // [B, S], 1 in padding
  std::int32_t* cu_seqlens;         // [B, borders]: 0, and the sum of places up to each segment's end, then the last
  std::int32_t* cu_seqlens_padded;  // [B, borders]: 0, the end of each segment, then S
  std::int32_t* max_seqlen;         // [B], padded length of the longest piece
};

// Gathers packs: sample i has pieces[firsts[i], firsts[i + 1]) of source datasets[i]. What is refused, absent or
// missing is as in gather(); so is a pack whose pieces do not fit into S places.
Gathered gather_packs(std::span<const SampleSource> sources, const TokenFiles& files,
                      std::span<const std::int32_t> datasets, std::span<const PackedPiece> pieces,
                      std::span<const std::int64_t> firsts, const PackedShape& shape, const PackedRows& rows, Isa level,
                      int num_threads, Workers& workers, Poll& poll);

}  // namespace trackbed
