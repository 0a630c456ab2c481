#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "trackbed/poll.hpp"

namespace trackbed {

// Finds the start of each sample in the stream of visited documents. Row k of `rows` is the visit of stream token
// k * sequence_length, and the token's offset in that visit.
//
// With extra_token = 1 a sample also holds the first token of the next one, and a row lies inside a document. With 0, a
// row at a border points to the end of the previous document. A row past the last token repeats the end of the stream:
// with 1 the last token, with 0 the last visit, which may be empty, and its length.
//
// `lengths` holds one int32 per document, which may be unaligned as in an index file. If the rows depend on a visit
// that is out of range, or whose document has a negative length, returns the first such visit, and `rows` is undefined.
// Otherwise returns visits.size().
// Requires: rows.size() is even and at least 2, sequence_length >= 1, extra_token is 0 or 1, visits.size() and all
// lengths fit Row, and rows.size() / 2 * sequence_length fits 63 bits. O(visits + rows); lengths of scattered documents
// are prefetched, and threads process chunks of visits in turn.
template <class Visit, class Row>
std::size_t sample_index(std::span<const std::byte> lengths, std::span<const Visit> visits,
                         std::int64_t sequence_length, std::int64_t extra_token, std::span<Row> rows,
                         std::int64_t num_threads, Poll& poll);

// Joins each document with its length, once per epoch, so that a shuffle moves both at once: the length in the upper 32
// bits, the document in the lower ones.
// Requires: a length for each document, and pairs.size() is a multiple of documents.size(), 0 without documents. O(N).
void pair_lengths(std::span<const std::int32_t> documents, std::span<const std::byte> lengths,
                  std::span<std::uint64_t> pairs, Poll& poll);

// Writes the documents of visits that were paired with their lengths, and cuts the visits into samples, as
// sample_index() does, in one pass without scattered reads.
// Requires: pairs.size() == documents.size(), and what sample_index() requires.
std::size_t cut_pairs(std::span<const std::uint64_t> pairs, std::span<std::int32_t> documents,
                      std::int64_t sequence_length, std::int64_t extra_token, std::span<std::int32_t> rows,
                      std::int64_t num_threads, Poll& poll);

}  // namespace trackbed
