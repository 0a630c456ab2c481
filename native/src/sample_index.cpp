#include "trackbed/sample_index.hpp"

#include <cstddef>

namespace trackbed {

namespace {

// The last visit that has tokens; 0 where none has.
template <class Visit>
std::size_t last_with_tokens(std::span<const std::int32_t> lengths, std::span<const Visit> visits) {
  for (std::size_t visit = visits.size(); visit > 0; --visit) {
    if (lengths[static_cast<std::size_t>(visits[visit - 1])] > 0) {
      return visit - 1;
    }
  }
  return 0;
}

}  // namespace

template <class Visit, class Row>
void sample_index(std::span<const std::int32_t> lengths, std::span<const Visit> visits, std::int64_t sequence_length,
                  std::int64_t extra_token, std::span<Row> rows) {
  rows[0] = 0;
  rows[1] = 0;
  const std::size_t num_rows = rows.size() / 2;
  std::size_t visit = 0;
  std::int64_t before = 0;  // tokens in the visits before `visit`
  for (std::size_t row = 1; row < num_rows; ++row) {
    const std::int64_t start = static_cast<std::int64_t>(row) * sequence_length;
    std::int64_t length = 0;
    for (; visit < visits.size(); ++visit, before += length) {
      length = lengths[static_cast<std::size_t>(visits[visit])];
      if (start + extra_token <= before + length) {
        break;
      }
    }
    if (visit < visits.size()) {
      rows[2 * row] = static_cast<Row>(visit);
      rows[2 * row + 1] = static_cast<Row>(start - before);
      continue;
    }
    // Without the extra token an empty last visit has an end to point to, and Megatron Core points there.
    const std::size_t last =
        extra_token == 0 && !visits.empty() ? visits.size() - 1 : last_with_tokens(lengths, visits);
    const std::int64_t end = visits.empty() ? 0 : lengths[static_cast<std::size_t>(visits[last])] - extra_token;
    for (; row < num_rows; ++row) {
      rows[2 * row] = static_cast<Row>(last);
      rows[2 * row + 1] = static_cast<Row>(end > 0 ? end : 0);
    }
  }
}

template void sample_index(std::span<const std::int32_t>, std::span<const std::int32_t>, std::int64_t, std::int64_t,
                           std::span<std::int32_t>);
template void sample_index(std::span<const std::int32_t>, std::span<const std::int32_t>, std::int64_t, std::int64_t,
                           std::span<std::int64_t>);
template void sample_index(std::span<const std::int32_t>, std::span<const std::int64_t>, std::int64_t, std::int64_t,
                           std::span<std::int64_t>);

}  // namespace trackbed
