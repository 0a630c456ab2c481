#pragma once

#include <cstdint>
#include <span>

namespace trackbed {

// Where each sample starts in the stream that visiting the documents of `visits` in turn spells out.
// Row k of `rows` is (visit, token offset inside it) of stream token k * sequence_length.
//
// With extra_token = 1 a sample also holds the first token of the next one. A row then lies inside a
// document. With 0, a row at a border points to the end of the document before it. A row past the last
// token repeats the stream's end: with 1 the last token, with 0 the last visit, which may be empty, and its
// length.
// Requires: rows.size() is even and at least 2, sequence_length >= 1, extra_token is 0 or 1, lengths >= 0,
// every visit indexes `lengths`, visits.size() and all lengths fit Row, and rows.size() / 2 * sequence_length
// fits 63 bits. O(visits + rows).
template <class Visit, class Row>
void sample_index(std::span<const std::int32_t> lengths, std::span<const Visit> visits, std::int64_t sequence_length,
                  std::int64_t extra_token, std::span<Row> rows);

}  // namespace trackbed
