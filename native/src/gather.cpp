#include "trackbed/gather.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "trackbed/gather_loops.hpp"

namespace trackbed {

namespace {

constexpr std::size_t kPlanned = 16;    // samples planned per task: some microseconds
constexpr std::size_t kMaskRows = 256;  // rows of an attention mask per task: up to a few milliseconds

// Writes tokens and labels, text[0, S) and text[1, S + 1), from spans of the text.
class Text {
 public:
  Text(const GatherLoops& loops, const SampleShape& shape, std::int64_t dtype, std::int64_t* tokens,
       std::int64_t* labels)
      : loops_(loops),
        length_(shape.length),
        dtype_(dtype),
        token_bytes_(token_bytes_of(dtype)),
        tokens_(tokens),
        labels_(labels) {}

  void add(Span span) {
    const std::int64_t first = at_ == 0 ? 1 : 0;  // the first token is not a label
    widen(span, 0, std::min(span.count, length_ - at_), tokens_ + at_);
    widen(span, first, span.count - first, labels_ + at_ - 1 + first);
    at_ += span.count;
  }

  // Pads both, and returns the number of tokens added before.
  std::int64_t fill(std::int64_t pad) {
    std::fill(tokens_ + std::min(at_, length_), tokens_ + length_, pad);
    std::fill(labels_ + std::max<std::int64_t>(at_ - 1, 0), labels_ + length_, pad);
    return at_;
  }

 private:
  void widen(Span span, std::int64_t first, std::int64_t count, std::int64_t* target) const {
    if (count > 0) {
      loops_.widen(dtype_, span.tokens + first * token_bytes_, static_cast<std::size_t>(count), target);
    }
  }

  const GatherLoops& loops_;
  std::int64_t length_;
  std::int64_t dtype_;
  std::int64_t token_bytes_;
  std::int64_t* tokens_;
  std::int64_t* labels_;
  std::int64_t at_ = 0;
};

// True if a token of this type can have the value `pad`.
bool can_be(std::int64_t dtype, std::int64_t pad) {
  switch (dtype) {
    case 1:
      return pad >= 0 && pad <= std::numeric_limits<std::uint8_t>::max();
    case 8:
      return pad >= 0 && pad <= std::numeric_limits<std::uint16_t>::max();
    default:
      return true;
  }
}

// Writes `[S + 1]` borders: 0, the end of each document, then S as padding. Padding tokens belong to the last document.
// Returns the longest length.
std::int32_t write_borders(const std::vector<std::int64_t>& ends, std::int64_t num_tokens, std::int64_t length,
                           std::int32_t* borders) {
  std::int64_t count = 0;
  borders[0] = 0;
  for (const std::int64_t end : ends) {
    if (end > borders[count] && end < std::min(num_tokens, length)) {
      borders[++count] = static_cast<std::int32_t>(end);
    }
  }
  std::fill(borders + count + 1, borders + length + 1, static_cast<std::int32_t>(length));
  std::int32_t longest = 0;
  for (std::int64_t at = 0; at <= count; ++at) {
    longest = std::max(longest, borders[at + 1] - borders[at]);
  }
  return longest;
}

// The same as Megatron Core has them, with a border for each empty document, from the ends of all pieces of a sample:
// its extra token is no document of its own, and where it would be one that is short, the padding belongs to the one
// before.
std::int32_t write_document_borders(std::span<const std::int64_t> ends, const SampleShape& shape,
                                    std::int32_t* borders) {
  const std::int64_t num_tokens = ends.back();
  std::span<const std::int64_t> inner = ends.first(ends.size() - 1);
  if (shape.extra != 0 && !inner.empty() && num_tokens - inner.back() == 1) {
    inner = inner.first(inner.size() - 1);
  }
  const auto length = static_cast<std::size_t>(shape.length);
  if (inner.size() >= length) {  // more empty documents than there are places
    return write_borders({ends.begin(), ends.end()}, num_tokens, shape.length, borders);
  }
  borders[0] = 0;
  for (std::size_t at = 0; at < length; ++at) {
    borders[at + 1] = static_cast<std::int32_t>(at < inner.size() ? std::min(inner[at], shape.length) : shape.length);
  }
  std::int32_t longest = 0;
  for (std::size_t at = 0; at <= inner.size(); ++at) {
    longest = std::max(longest, borders[at + 1] - borders[at]);
  }
  return longest;
}

// Writes rows [first, stop) of the mask of a sample whose documents begin at `starts`: later tokens and those of other
// documents are masked.
void write_mask(const std::vector<std::int64_t>& starts, std::size_t first, std::size_t stop, std::size_t length,
                std::uint8_t* mask) {
  auto document = std::upper_bound(starts.begin(), starts.end(), static_cast<std::int64_t>(first)) - 1;
  for (std::size_t row = first; row < stop; ++row) {
    if (document + 1 != starts.end() && *(document + 1) == static_cast<std::int64_t>(row)) {
      ++document;
    }
    const auto start = static_cast<std::size_t>(*document);
    std::uint8_t* const columns = mask + row * length;
    std::memset(columns, 1, start);
    std::memset(columns + start, 0, row + 1 - start);
    std::memset(columns + row + 1, 1, length - row - 1);
  }
}

class Batch {
 public:
  Batch(const SampleShape& shape, const BatchRows& rows, Isa level, std::size_t size)
      : shape_(shape), rows_(rows), loops_(gather_loops_at(level)), starts_(size) {}

  void write(std::size_t sample, std::int64_t dtype, const SampleSpans& plan) {
    const auto length = static_cast<std::size_t>(shape_.length);
    const std::size_t row = sample * length;
    std::int64_t* const tokens = rows_.tokens + row;
    std::int64_t* const labels = rows_.labels + row;
    if (shape_.resets_positions == 0 && shape_.keeps_documents_apart == 0) {  // first, while the tokens are prefetched
      loops_.count_up(rows_.position_ids + row, length);
    }
    Text text(loops_, shape_, dtype, tokens, labels);
    for (const Span& span : plan.spans) {
      text.add(span);
    }
    const std::int64_t num_tokens = text.fill(shape_.pad);
    if (shape_.resets_positions != 0 || rows_.attention_mask != nullptr) {
      starts_[sample] = find_starts(tokens);
    }
    if (shape_.resets_positions != 0 && shape_.keeps_documents_apart == 0) {
      write_positions(starts_[sample], rows_.position_ids + row);
    }
    const bool is_whole = num_tokens == shape_.length + 1;
    if (is_whole && shape_.masks_eod == 0 && !can_be(dtype, shape_.pad)) {
      loops_.keep_all(length, rows_.loss_mask + row);
    } else {
      loops_.mask(tokens, labels, length, shape_.pad, shape_.eod, shape_.masks_eod != 0, rows_.loss_mask + row);
    }
    if (shape_.masks_borders != 0) {
      for (const std::int64_t end : plan.borders) {
        if (end > 0 && end <= shape_.length) {  // the label behind the last input may begin another sequence, too
          rows_.loss_mask[row + static_cast<std::size_t>(end) - 1] = 0.0F;
        }
      }
    }
    if (rows_.cu_seqlens != nullptr) {
      std::int32_t* const borders = rows_.cu_seqlens + sample * (length + 1);
      // Pieces of visits have the end of the last one, too; those of a stretch only borders inside the sample.
      const bool has_pieces = !plan.borders.empty() && plan.borders.back() == num_tokens;
      rows_.max_seqlen[sample] = shape_.keeps_documents_apart != 0 && has_pieces
                                     ? write_document_borders(plan.borders, shape_, borders)
                                     : write_borders(plan.borders, num_tokens, shape_.length, borders);
      if (shape_.keeps_documents_apart != 0) {
        write_positions_between(borders, rows_.position_ids + row);
      }
    }
  }

  // Writes block number `block` of kMaskRows rows of the mask of a sample.
  void write_mask_block(std::size_t sample, std::size_t block) const {
    const auto length = static_cast<std::size_t>(shape_.length);
    const std::size_t first = block * kMaskRows;
    write_mask(starts_[sample], first, std::min(first + kMaskRows, length), length,
               rows_.attention_mask + sample * length * length);
  }

 private:
  // Positions of document starts: 0, and the position after each end-of-document token.
  std::vector<std::int64_t> find_starts(const std::int64_t* tokens) const {
    std::vector<std::int64_t> starts{0};
    for (std::int64_t next = 0;; ++next) {
      next += static_cast<std::int64_t>(
          loops_.find(tokens + next, static_cast<std::size_t>(shape_.length - next), shape_.eod));
      if (next >= shape_.length - 1) {
        return starts;
      }
      starts.push_back(next + 1);
    }
  }

  void write_positions(const std::vector<std::int64_t>& starts, std::int64_t* positions) const {
    for (std::size_t document = 0; document < starts.size(); ++document) {
      const std::int64_t stop = document + 1 < starts.size() ? starts[document + 1] : shape_.length;
      loops_.count_up(positions + starts[document], static_cast<std::size_t>(stop - starts[document]));
    }
  }

  void write_positions_between(const std::int32_t* borders, std::int64_t* positions) const {
    for (std::int64_t at = 0; borders[at] < shape_.length; ++at) {
      loops_.count_up(positions + borders[at], static_cast<std::size_t>(borders[at + 1] - borders[at]));
    }
  }

  const SampleShape& shape_;
  const BatchRows& rows_;
  GatherLoops loops_;
  std::vector<std::vector<std::int64_t>> starts_;  // document starts of each sample, if needed
};

// Plans of the samples of a batch, made before any sample is written. Threads may plan different samples concurrently.
class Plans {
 public:
  Plans(std::span<const SampleSource> sources, const TokenFiles& files, const SampleShape& shape, std::size_t size)
      : sources_(sources), files_(files), shape_(shape), outcomes_(size, Planned::refused), plans_(size) {}

  // Plans the samples [first, stop): sample i is at positions[i] of source datasets[i].
  void make(std::size_t first, std::size_t stop, std::span<const std::int32_t> datasets,
            std::span<const std::int64_t> positions) {
    for (int step = 0; step < kApproachSteps; ++step) {
      for (std::size_t sample = first; sample < stop; ++sample) {
        if (const SampleSource* source = source_of(datasets[sample])) {
          approach_plan(*source, files_.files, positions[sample], step);
        }
      }
    }
    for (std::size_t sample = first; sample < stop; ++sample) {
      if (const SampleSource* source = source_of(datasets[sample])) {
        outcomes_[sample] =
            plan_spans(*source, files_, positions[sample], shape_.length + shape_.extra, shape_.extra, plans_[sample]);
      }
    }
  }

  // The first refused sample, and what is missing.
  Gathered found() const {
    const auto refused = std::find(outcomes_.begin(), outcomes_.end(), Planned::refused);
    Gathered found{refused - outcomes_.begin(), {}, {}};
    for (const SampleSpans& plan : plans_) {
      found.absent.insert(found.absent.end(), plan.absent.begin(), plan.absent.end());
      found.missing.insert(found.missing.end(), plan.missing.begin(), plan.missing.end());
    }
    return found;
  }

  const SampleSpans& operator[](std::size_t sample) const { return plans_[sample]; }

 private:
  const SampleSource* source_of(std::int32_t dataset) const {
    const auto number = static_cast<std::size_t>(dataset);
    return dataset >= 0 && number < sources_.size() ? &sources_[number] : nullptr;
  }

  std::span<const SampleSource> sources_;
  const TokenFiles& files_;
  const SampleShape& shape_;
  std::vector<Planned> outcomes_;
  std::vector<SampleSpans> plans_;
};

}  // namespace

Gathered gather(std::span<const SampleSource> sources, const TokenFiles& files, std::span<const std::int32_t> datasets,
                std::span<const std::int64_t> positions, const SampleShape& shape, const BatchRows& rows, Isa level,
                int num_threads, Workers& workers, Poll& poll) {
  const std::size_t size = positions.size();
  const auto dtype_of = [&](std::size_t sample) { return sources[static_cast<std::size_t>(datasets[sample])].dtype; };
  Plans plans(sources, files, shape, size);
  const std::size_t stretches = (size + kPlanned - 1) / kPlanned;
  workers.run(static_cast<std::int64_t>(stretches), num_threads, poll, [&](std::int64_t number) {
    const std::size_t first = static_cast<std::size_t>(number) * kPlanned;
    plans.make(first, std::min(first + kPlanned, size), datasets, positions);
  });
  Gathered found = plans.found();
  if (rows.tokens == nullptr || found.refused < static_cast<std::int64_t>(size) || !found.absent.empty() ||
      !found.missing.empty()) {
    return found;
  }
  Batch batch(shape, rows, level, size);
  if (size > 0) {
    prefetch_tokens(plans[0].spans, token_bytes_of(dtype_of(0)));
  }
  workers.run(static_cast<std::int64_t>(size), num_threads, poll, [&](std::int64_t number) {
    const auto sample = static_cast<std::size_t>(number);
    const std::size_t next = sample + 1;
    if (next < size) {  // almost always this thread's next sample
      prefetch_tokens(plans[next].spans, token_bytes_of(dtype_of(next)));
    }
    batch.write(sample, dtype_of(sample), plans[sample]);
  });
  if (rows.attention_mask != nullptr) {
    const std::size_t blocks = (static_cast<std::size_t>(shape.length) + kMaskRows - 1) / kMaskRows;
    workers.run(static_cast<std::int64_t>(size * blocks), num_threads, poll, [&](std::int64_t number) {
      const auto block = static_cast<std::size_t>(number);
      batch.write_mask_block(block / blocks, block % blocks);
    });
  }
  return found;
}

}  // namespace trackbed
