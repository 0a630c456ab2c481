#include "trackbed/gather_packs.hpp"

#include <algorithm>
#include <cstring>
#include <optional>

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

struct Run {
  std::uint32_t start;
  std::uint32_t count;
};

// The trained labels of a piece: runs of tokens of its document, and the token that is the label of its first input.
struct Trained {
  std::span<const Run> runs;
  std::int64_t first_label;
  bool is_whole;  // all labels are trained, and there are no runs
};

// The runs of a piece's document, or nothing if they are damaged.
std::optional<Trained> trained_of(const SampleSource& source, const TokenFiles& files,
                                  std::span<const TrainedRuns> trained, const PackedPiece& piece) {
  const auto [number, sequence] = find_sequence(source, files.files, piece.document);
  const TrainedRuns& table = trained[static_cast<std::size_t>(number)];
  if (table.firsts == nullptr) {
    return Trained{{}, piece.start + 1, true};
  }
  if (sequence < 0 || sequence >= table.num_documents) {
    return std::nullopt;
  }
  const std::uint64_t first = table.firsts[sequence];
  const std::uint64_t stop = table.firsts[sequence + 1];
  if (first > stop || stop > static_cast<std::uint64_t>(table.num_runs)) {
    return std::nullopt;
  }
  static_assert(sizeof(Run) == 2 * sizeof(std::uint32_t));
  const auto* const runs = reinterpret_cast<const Run*>(table.runs) + first;
  return Trained{{runs, static_cast<std::size_t>(stop - first)}, piece.start + 1, false};
}

// Calls call(start, stop) for each run of trained tokens of a document, as far as it lies in [first, first + count).
template <typename Call>
void for_each_run(const Trained& trained, std::int64_t first, std::int64_t count, const Call& call) {
  const std::int64_t last = first + count;
  auto run = std::partition_point(trained.runs.begin(), trained.runs.end(), [first](const Run& one) {
    return static_cast<std::int64_t>(one.start) + one.count <= first;
  });
  for (; run != trained.runs.end() && run->start < last; ++run) {
    const std::int64_t start = std::max<std::int64_t>(run->start, first);
    call(start, std::clamp(std::int64_t{run->start} + run->count, start, last));
  }
}

// Number of trained labels that are the tokens [first, first + count) of a document.
std::int64_t count_trained(const Trained& trained, std::int64_t first, std::int64_t count) {
  if (trained.is_whole) {
    return count;
  }
  std::int64_t found = 0;
  std::int64_t end = first;  // of the runs before: runs of a damaged file may overlap
  for_each_run(trained, first, count, [&](std::int64_t start, std::int64_t stop) {
    found += std::max<std::int64_t>(stop - std::max(start, end), 0);
    end = std::max(end, stop);
  });
  return found;
}

struct PackSpans {
  SampleSpans spans;
  std::vector<Trained> trained;
};

class PackWriter {
 public:
  PackWriter(const PackedShape& shape, const PackedRows& rows, Isa level)
      : shape_(shape), rows_(rows), loops_(gather_loops_at(level)) {}

  void write(std::size_t sample, std::int64_t dtype, const PackSpans& plan) const {
    const auto row = static_cast<std::int64_t>(sample);
    const std::int64_t border = row * shape_.borders;
    Borders borders{rows_.cu_seqlens + border, rows_.cu_seqlens_padded + border, rows_.cu_trained_tokens + border};
    const std::int64_t start = row * (shape_.length / shape_.context_size);
    for (std::size_t piece = 0; piece < plan.spans.spans.size(); ++piece) {
      const Span& span = plan.spans.spans[piece];
      const std::int64_t segment = padded(span.count - 1, shape_);
      write_segment(start + borders.stop / shape_.context_size, dtype, span, plan.trained[piece], segment);
      const Trained& labels = plan.trained[piece];
      borders.add(span.count - 1, segment, count_trained(labels, labels.first_label, span.count - 1));
    }
    rows_.max_seqlen[sample] = borders.longest;
    rows_.num_trained_tokens[sample] = borders.trained_tokens;
    rows_.num_documents[sample] = borders.documents;
    const std::int64_t rest = shape_.length - borders.stop;
    if (rest > 0) {
      write_segment(start + borders.stop / shape_.context_size, dtype, {nullptr, 1}, {{}, 1, true}, rest);
      borders.add(0, rest, 0);
    }
    borders.fill(shape_.borders);
  }

 private:
  struct Borders {
    std::int32_t* logical;
    std::int32_t* padded;
    std::int32_t* trained;
    std::int64_t count = 0;
    std::int64_t places = 0;
    std::int64_t stop = 0;
    std::int32_t longest = 0;
    std::int64_t trained_tokens = 0;
    std::int64_t documents = 0;

    void add(std::int64_t more, std::int64_t segment, std::int64_t more_trained) {
      logical[count] = static_cast<std::int32_t>(places);
      trained[count] = static_cast<std::int32_t>(trained_tokens);
      padded[count++] = static_cast<std::int32_t>(stop);
      places += more;
      stop += segment;
      trained_tokens += more_trained;
      documents += more_trained > 0 ? 1 : 0;
      longest = more > 0 ? std::max(longest, static_cast<std::int32_t>(segment)) : longest;
    }

    void fill(std::int64_t size) {
      std::fill(logical + count, logical + size, static_cast<std::int32_t>(places));
      std::fill(padded + count, padded + size, static_cast<std::int32_t>(stop));
      std::fill(trained + count, trained + size, static_cast<std::int32_t>(trained_tokens));
    }
  };

  // Writes this rank's places of a segment from place `at` of the rows on.
  void write_segment(std::int64_t at, std::int64_t dtype, Span span, const Trained& trained,
                     std::int64_t segment) const {
    if (shape_.context_size == 1) {
      return write_part(at, dtype, span, trained, 0, segment);
    }
    const std::int64_t part = segment / (2 * shape_.context_size);
    write_part(at, dtype, span, trained, part * shape_.context_rank, part);
    write_part(at + part, dtype, span, trained, part * (2 * shape_.context_size - 1 - shape_.context_rank), part);
  }

  // Writes places [first, first + count) of a segment, of which those behind the span's last input are padding.
  void write_part(std::int64_t at, std::int64_t dtype, Span span, const Trained& trained, std::int64_t first,
                  std::int64_t count) const {
    const std::int64_t places = std::clamp<std::int64_t>(span.count - 1 - first, 0, count);
    const auto size = static_cast<std::size_t>(places);
    write_positions(at, first, count);
    if (places > 0) {
      const std::int64_t token_bytes = token_bytes_of(dtype);
      loops_.widen(dtype, span.tokens + first * token_bytes, size, rows_.tokens + at);
      loops_.widen(dtype, span.tokens + (first + 1) * token_bytes, size, rows_.labels + at);
      std::memset(rows_.padding_mask + at, 0, size);
      write_mask(trained, trained.first_label + first, places, rows_.loss_mask + at);
    }
    pad(at + places, count - places);
  }

  void write_positions(std::int64_t at, std::int64_t first, std::int64_t count) const {
    if (first == 0) {
      return loops_.count_up(rows_.position_ids + at, static_cast<std::size_t>(count));
    }
    for (std::int64_t i = 0; i < count; ++i) {
      rows_.position_ids[at + i] = first + i;
    }
  }

  // Writes the mask of labels that are the tokens [first, first + count) of a document. Runs in disorder leave labels
  // out, or trained twice, and lead nowhere else.
  void write_mask(const Trained& trained, std::int64_t first, std::int64_t count, float* mask) const {
    if (trained.is_whole) {
      return loops_.keep_all(static_cast<std::size_t>(count), mask);
    }
    std::fill_n(mask, count, 0.0F);
    for_each_run(trained, first, count, [&](std::int64_t start, std::int64_t stop) {
      std::fill(mask + (start - first), mask + (stop - first), 1.0F);
    });
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
                      std::span<const TrainedRuns> trained, std::span<const std::int32_t> datasets,
                      std::span<const PackedPiece> pieces, std::span<const std::int64_t> firsts,
                      const PackedShape& shape, const PackedRows& rows, Isa level, int num_threads, Workers& workers,
                      Poll& poll) {
  const std::size_t size = datasets.size();
  std::vector<Planned> outcomes(size, Planned::refused);
  std::vector<PackSpans> plans(size);
  const auto source_of = [&](std::size_t sample) {
    const auto number = static_cast<std::size_t>(datasets[sample]);
    return datasets[sample] >= 0 && number < sources.size() ? &sources[number] : nullptr;
  };
  const auto is_in_order = [&](std::size_t sample) {
    const std::int64_t first = firsts[sample];
    const std::int64_t stop = firsts[sample + 1];
    return 0 <= first && first <= stop && stop <= static_cast<std::int64_t>(pieces.size());
  };
  const auto pieces_of = [&](std::size_t sample) {
    const auto first = static_cast<std::size_t>(firsts[sample]);
    const auto stop = static_cast<std::size_t>(firsts[sample + 1]);
    return is_in_order(sample) ? pieces.subspan(first, stop - first) : std::span<const PackedPiece>();
  };
  const auto plan = [&](std::size_t sample) {
    const SampleSource* source = source_of(sample);
    if (source == nullptr || !is_in_order(sample) || !fits(pieces_of(sample), shape)) {
      return Planned::refused;
    }
    const Planned found = plan_pieces(*source, files, pieces_of(sample), plans[sample].spans);
    for (const PackedPiece& piece : pieces_of(sample)) {
      const std::optional<Trained> labels =
          found == Planned::whole ? trained_of(*source, files, trained, piece) : Trained{};
      if (!labels) {
        return Planned::refused;
      }
      plans[sample].trained.push_back(*labels);
    }
    return found;
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
      outcomes[sample] = plan(sample);
    }
  });
  Gathered found{std::find(outcomes.begin(), outcomes.end(), Planned::refused) - outcomes.begin(), {}, {}};
  for (const PackSpans& one : plans) {
    found.absent.insert(found.absent.end(), one.spans.absent.begin(), one.spans.absent.end());
    found.missing.insert(found.missing.end(), one.spans.missing.begin(), one.spans.missing.end());
  }
  if (rows.tokens == nullptr || found.refused < static_cast<std::int64_t>(size) || !found.absent.empty() ||
      !found.missing.empty()) {
    return found;
  }
  const PackWriter writer(shape, rows, level);
  for (std::size_t sample = 0; sample < size; ++sample) {
    read_ahead_long(plans[sample].spans.spans, token_bytes_of(source_of(sample)->dtype));
  }
  if (size > 0) {
    prefetch_tokens(plans[0].spans.spans, token_bytes_of(source_of(0)->dtype));
  }
  workers.run(static_cast<std::int64_t>(size), num_threads, poll, [&](std::int64_t number) {
    const auto sample = static_cast<std::size_t>(number);
    if (sample + 1 < size) {  // almost always this thread's next pack
      prefetch_tokens(plans[sample + 1].spans.spans, token_bytes_of(source_of(sample + 1)->dtype));
    }
    writer.write(sample, source_of(sample)->dtype, plans[sample]);
  });
  return found;
}

}  // namespace trackbed
