#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "trackbed/poll.hpp"

namespace trackbed {

// Where each sample starts in the stream that visiting the documents of `visits` in turn spells out.
// Row k of `rows` is (visit, token offset inside it) of stream token k * sequence_length.
//
// With extra_token = 1 a sample also holds the first token of the next one. A row then lies inside a
// document. With 0, a row at a border points to the end of the document before it. A row past the last
// token repeats the stream's end: with 1 the last token, with 0 the last visit, which may be empty, and its
// length.
//
// `lengths` holds an int32 for each document, at any address: an index file has them at an odd one. Returns the
// first visit that names no document, or one of negative length, if the rows depend on it; `rows` then means nothing.
// Else visits.size().
// Requires: rows.size() is even and at least 2, sequence_length >= 1, extra_token is 0 or 1, visits.size() and all
// lengths fit Row, and rows.size() / 2 * sequence_length fits 63 bits. O(visits + rows); the lengths of far apart
// documents are gathered ahead of their use, and threads share them in turn.
template <class Visit, class Row>
std::size_t sample_index(std::span<const std::byte> lengths, std::span<const Visit> visits,
                         std::int64_t sequence_length, std::int64_t extra_token, std::span<Row> rows,
                         std::int64_t num_threads, Poll& poll);

}  // namespace trackbed
