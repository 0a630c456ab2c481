#include "trackbed/gather_packs.hpp"

#include <algorithm>
#include <cstring>

#include "trackbed/gather_loops.hpp"

namespace trackbed {

namespace {

constexpr std::size_t kPlanned = 4;  // packs planned per task: some microseconds

std::int64_t padded(std::int64_t places, const PackedShape& shape) {
  return (places + shape.multiple - 1) / shape.multiple * shape.multiple;
}

bool fits(std::span<const PackedPiece> pieces, const PackedShape& shape) {
  std::int64_t places = 0;
  for (const PackedPiece& piece : pieces) {
    places += padded(piece.stop - piece.start, shape);
  }
  return places <= shape.length && static_cast<std::int64_t>(pieces.size()) + 2 <= shape.borders;
}

class PackWriter {
 public:
  PackWriter(const PackedShape& shape, const PackedRows& rows, Isa level)
      : shape_(shape), rows_(rows), loops_(gather_loops_at(level)) {}

  void write(std::size_t sample, std::int64_t dtype, std::span<const Span> spans) const {
    const auto row = static_cast<std::int64_t>(sample) * shape_.length;
    Borders borders{rows_.cu_seqlens + static_cast<std::int64_t>(sample) * shape_.borders,
                    rows_.cu_seqlens_padded + static_cast<std::int64_t>(sample) * shape_.borders};
    for (const Span& span : spans) {
      const std::int64_t places = span.count - 1;
      const std::int64_t segment = padded(places, shape_);
      write_piece(row + borders.stop, dtype, span, segment);
      borders.add(places, segment);
    }
    rows_.max_seqlen[sample] = borders.longest;
    const std::int64_t rest = shape_.length - borders.stop;
    if (rest > 0) {
      pad(row + borders.stop, rest);
      loops_.count_up(rows_.position_ids + row + borders.stop, static_cast<std::size_t>(rest));
      borders.add(0, rest);
    }
    borders.fill(shape_.borders);
  }

 private:
  struct Borders {
    std::int32_t* logical;
    std::int32_t* padded;
    std::int64_t count = 0;
    std::int64_t places = 0;
    std::int64_t stop = 0;
    std::int32_t longest = 0;

    void add(std::int64_t more, std::int64_t segment) {
      logical[count] = static_cast<std::int32_t>(places);
      padded[count++] = static_cast<std::int32_t>(stop);
      places += more;
      stop += segment;
      longest = more > 0 ? std::max(longest, static_cast<std::int32_t>(segment)) : longest;
    }

    void fill(std::int64_t size) {
      std::fill(logical + count, logical + size, static_cast<std::int32_t>(places));
      std::fill(padded + count, padded + size, static_cast<std::int32_t>(stop));
    }
  };

  void write_piece(std::int64_t at, std::int64_t dtype, Span span, std::int64_t segment) const {
    const std::int64_t places = span.count - 1;
    const auto count = static_cast<std::size_t>(places);
    loops_.count_up(rows_.position_ids + at, static_cast<std::size_t>(segment));
    loops_.widen(dtype, span.tokens, count, rows_.tokens + at);
    loops_.widen(dtype, span.tokens + token_bytes_of(dtype), count, rows_.labels + at);
    loops_.keep_all(count, rows_.loss_mask + at);
    std::memset(rows_.padding_mask + at, 0, count);
    pad(at + places, segment - places);
  }

  // Fills places with padding, but for their positions.
  void pad(std::int64_t at, std::int64_t count) const {
    std::fill_n(rows_.tokens + at, count, 0);
    std::fill_n(rows_.labels + at, count, 0);
    std::fill_n(rows_.loss_mask + at, count, 0.0F);
    std::memset(rows_.padding_mask + at, 1, static_cast<std::size_t>(count));
  }

  const PackedShape& shape_;
  const PackedRows& rows_;
  GatherLoops loops_;
};

}  // namespace

Gathered gather_packs(std::span<const SampleSource> sources, const TokenFiles& files,
                      std::span<const std::int32_t> datasets, std::span<const PackedPiece> pieces,
                      std::span<const std::int64_t> firsts, const PackedShape& shape, const PackedRows& rows, Isa level,
                      int num_threads, Workers& workers, Poll& poll) {
  const std::size_t size = datasets.size();
  std::vector<Planned> outcomes(size, Planned::refused);
  std::vector<SampleSpans> plans(size);
  const auto source_of = [&](std::size_t sample) {
    const auto number = static_cast<std::size_t>(datasets[sample]);
    return datasets[sample] >= 0 && number < sources.size() ? &sources[number] : nullptr;
  };
  const auto pieces_of = [&](std::size_t sample) {
    const auto first = static_cast<std::size_t>(firsts[sample]);
    return pieces.subspan(first, static_cast<std::size_t>(firsts[sample + 1]) - first);
  };
  const std::size_t stretches = (size + kPlanned - 1) / kPlanned;
  workers.run(static_cast<std::int64_t>(stretches), num_threads, poll, [&](std::int64_t number) {
    const std::size_t first = static_cast<std::size_t>(number) * kPlanned;
    const std::size_t stop = std::min(first + kPlanned, size);
    for (std::size_t sample = first; sample < stop; ++sample) {
      if (const SampleSource* source = source_of(sample)) {
        approach_pieces(*source, files.files, pieces_of(sample));
      }
    }
    for (std::size_t sample = first; sample < stop; ++sample) {
      const SampleSource* source = source_of(sample);
      if (source != nullptr && fits(pieces_of(sample), shape)) {
        outcomes[sample] = plan_pieces(*source, files, pieces_of(sample), plans[sample]);
      }
    }
  });
  Gathered found{std::find(outcomes.begin(), outcomes.end(), Planned::refused) - outcomes.begin(), {}, {}};
  for (const SampleSpans& plan : plans) {
    found.absent.insert(found.absent.end(), plan.absent.begin(), plan.absent.end());
    found.missing.insert(found.missing.end(), plan.missing.begin(), plan.missing.end());
  }
  if (rows.tokens == nullptr || found.refused < static_cast<std::int64_t>(size) || !found.absent.empty() ||
      !found.missing.empty()) {
    return found;
  }
  const PackWriter writer(shape, rows, level);
  if (size > 0) {
    prefetch_tokens(plans[0].spans, token_bytes_of(source_of(0)->dtype));
  }
  workers.run(static_cast<std::int64_t>(size), num_threads, poll, [&](std::int64_t number) {
    const auto sample = static_cast<std::size_t>(number);
    if (sample + 1 < size) {  // almost always this thread's next pack
      prefetch_tokens(plans[sample + 1].spans, token_bytes_of(source_of(sample + 1)->dtype));
    }
    writer.write(sample, source_of(sample)->dtype, plans[sample].spans);
  });
  return found;
}

}  // namespace trackbed
