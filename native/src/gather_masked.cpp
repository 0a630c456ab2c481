#include "trackbed/gather_masked.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "trackbed/gather_loops.hpp"

namespace trackbed {

namespace {

constexpr std::int64_t kNoLabel = -1;

// Consecutive tokens of some spans, of which `count` from `first` on are kept.
struct Segment {
  std::span<const Span> spans;
  std::int64_t first;
  std::int64_t count;
};

Segment whole(std::span<const Span> spans) {
  std::int64_t count = 0;
  for (const Span& span : spans) {
    count += span.count;
  }
  return {spans, 0, count};
}

std::size_t as_size(std::int64_t number) { return static_cast<std::size_t>(number); }

class Batch {
 public:
  Batch(const MaskingRules& rules, const MaskedRows& rows, Isa level)
      : rules_(rules), rows_(rows), level_(level), loops_(gather_loops_at(level)) {}

  // Writes a sample. Returns false if it is refused.
  bool write(std::size_t sample, std::int64_t dtype, std::int64_t position, const SentenceSpans& plan) const {
    if (plan.target > rules_.length) {
      return false;
    }
    NumpyRandom random(
        static_cast<std::uint32_t>(static_cast<std::uint64_t>(rules_.seed) + static_cast<std::uint64_t>(position)),
        level_);
    return rules_.is_t5 != 0 ? write_t5(sample, dtype, plan, random) : write_bert(sample, dtype, plan, random);
  }

 private:
  bool write_bert(std::size_t sample, std::int64_t dtype, const SentenceSpans& plan, NumpyRandom& random) const {
    const std::span<const Span> sentences = plan.spans;
    std::size_t pivot = sentences.size();
    bool is_swapped = false;
    if (rules_.has_segments != 0) {
      if (sentences.size() < 2) {
        return false;
      }
      pivot = 1 + (sentences.size() > 2 ? random.up_to(static_cast<std::uint32_t>(sentences.size() - 2)) : 0);
      is_swapped = random.is_below_half();
    }
    Segment first = whole(sentences.first(pivot));
    Segment second = whole(sentences.subspan(pivot));
    if (is_swapped) {
      std::swap(first, second);
    }
    rows_.truncated[sample] = first.count + second.count > plan.target ? 1 : 0;
    while (first.count + second.count > plan.target) {
      Segment& longer = first.count > second.count ? first : second;
      longer.first += random.is_below_half() ? 1 : 0;
      --longer.count;
    }
    const std::int64_t num_tokens = first.count + 2 + (second.count > 0 ? second.count + 1 : 0);
    if (num_tokens > rules_.length) {
      return false;
    }
    std::int64_t* const text = rows_.text + sample * as_size(rules_.length);
    std::int64_t* end = text;
    *end++ = rules_.cls;
    end = widen(first, dtype, end);
    *end++ = rules_.sep;
    std::int64_t* const middle = end;
    if (second.count > 0) {
      end = widen(second, dtype, end);
      *end++ = rules_.sep;
    }
    Masking masking(rules_);
    if (!masking.mask({text, end}, plan.target, random)) {
      return false;
    }
    rows_.is_random[sample] = is_swapped ? 1 : 0;
    finish_bert(sample, middle - text, end - text, masking);
    return true;
  }

  void finish_bert(std::size_t sample, std::int64_t middle, std::int64_t num_tokens, const Masking& masking) const {
    const std::size_t row = sample * as_size(rules_.length);
    std::int64_t* const text = rows_.text + row;
    std::int64_t* const types = rows_.types + row;
    std::int64_t* const labels = rows_.labels + row;
    std::int64_t* const loss_mask = rows_.loss_mask + row;
    const std::int64_t unlabelled = without_padding(kNoLabel);
    for (std::int64_t at = 0; at < num_tokens; ++at) {
      const bool is_labelled = masking.is_labelled()[as_size(at)] != 0;
      labels[at] = is_labelled ? without_padding(masking.labels()[as_size(at)]) : unlabelled;
      loss_mask[at] = is_labelled ? 1 : 0;
    }
    std::fill(labels + num_tokens, labels + rules_.length, unlabelled);
    std::fill(loss_mask + num_tokens, loss_mask + rules_.length, 0);
    std::fill(types, types + middle, 0);
    std::fill(types + middle, types + num_tokens, 1);
    std::fill(types + num_tokens, types + rules_.length, rules_.pad);
    std::fill(text + num_tokens, text + rules_.length, rules_.pad);
    replace_padding(text, rows_.padding_mask + row, rules_.length, rules_.pad);
  }

  bool write_t5(std::size_t sample, std::int64_t dtype, const SentenceSpans& plan, NumpyRandom& random) const {
    Segment all = whole(plan.spans);
    rows_.truncated[sample] = all.count > plan.target ? 1 : 0;
    all.count = std::min(all.count, plan.target);
    std::vector<std::int64_t> tokens(as_size(all.count));
    widen(all, dtype, tokens.data());
    Masking masking(rules_);
    if (!masking.mask(tokens, plan.target, random) || !has_space(masking)) {
      return false;
    }
    std::int64_t* const text_enc = rows_.text + sample * as_size(rules_.length);
    const std::size_t row = sample * as_size(rules_.decoder_length);
    std::int64_t* const text_dec = rows_.text_dec + row;
    std::int64_t* const labels = rows_.labels + row;
    std::int64_t* encoder = text_enc;
    std::int64_t* decoder = text_dec;
    std::size_t done = 0;
    const std::int64_t* sentinel = rules_.sentinels;
    *decoder++ = rules_.bos;
    for (const auto [first, stop] : masking.spans()) {
      const std::span<const std::uint32_t> positions = masking.positions().subspan(first, stop - first);
      encoder = std::copy(tokens.data() + done, tokens.data() + positions.front(), encoder);
      *encoder++ = *sentinel;
      *decoder++ = *sentinel++;
      for (const std::uint32_t position : positions) {
        *decoder++ = masking.labels()[position];
      }
      done = positions.back() + std::size_t{1};
    }
    encoder = std::copy(tokens.data() + done, tokens.data() + tokens.size(), encoder);
    std::fill(encoder, text_enc + rules_.length, rules_.pad);
    std::int64_t* const predicted =
        std::transform(text_dec + 1, decoder, labels, [this](std::int64_t token) { return without_padding(token); });
    *predicted = without_padding(rules_.eos);
    std::fill(predicted + 1, labels + rules_.decoder_length, without_padding(kNoLabel));
    std::fill(decoder, text_dec + rules_.decoder_length, rules_.pad);
    std::int64_t* const loss_mask = rows_.loss_mask + row;
    std::fill(loss_mask, loss_mask + (decoder - text_dec), 1);
    std::fill(loss_mask + (decoder - text_dec), loss_mask + rules_.decoder_length, 0);
    replace_padding(text_enc, rows_.enc_mask + sample * as_size(rules_.length), rules_.length, 0);
    replace_padding(text_dec, rows_.dec_mask + row, rules_.decoder_length, 0);
    return true;
  }

  // True if there are enough sentinels, and the decoder is long enough.
  bool has_space(const Masking& masking) const {
    std::size_t used = 1 + masking.spans().size();
    for (const auto [first, stop] : masking.spans()) {
      used += stop - first;
    }
    return masking.spans().size() <= as_size(rules_.num_sentinels) && used <= as_size(rules_.decoder_length);
  }

  // Widens the tokens of a segment. Returns the end of what it wrote.
  std::int64_t* widen(const Segment& segment, std::int64_t dtype, std::int64_t* target) const {
    const std::int64_t token_bytes = token_bytes_of(dtype);
    std::int64_t skipped = segment.first;
    std::int64_t missing = segment.count;
    for (const Span& span : segment.spans) {
      const std::int64_t begin = std::min(skipped, span.count);
      const std::int64_t count = std::min(span.count - begin, missing);
      skipped -= begin;
      if (count > 0) {
        loops_.widen(dtype, span.tokens + begin * token_bytes, as_size(count), target);
        target += count;
        missing -= count;
      }
    }
    return target;
  }

  std::int64_t without_padding(std::int64_t token) const { return token == rules_.pad ? 0 : token; }

  // Writes `padded` where a token is padding and 1 elsewhere, and replaces padding by 0.
  void replace_padding(std::int64_t* tokens, std::int64_t* mask, std::int64_t count, std::int64_t padded) const {
    for (std::int64_t at = 0; at < count; ++at) {
      const bool is_padding = tokens[at] == rules_.pad;
      mask[at] = is_padding ? padded : 1;
      tokens[at] = is_padding ? 0 : tokens[at];
    }
  }

  const MaskingRules& rules_;
  const MaskedRows& rows_;
  Isa level_;
  GatherLoops loops_;
};

}  // namespace

Gathered gather_masked(std::span<const SampleSource> sources, const TokenFiles& files,
                       std::span<const std::int32_t> datasets, std::span<const std::int64_t> positions,
                       const MaskingRules& rules, const MaskedRows& rows, Isa level, int num_threads, Workers& workers,
                       Poll& poll) {
  const std::size_t size = positions.size();
  const auto count = static_cast<std::int64_t>(size);
  std::vector<SentenceSpans> plans(size);
  std::vector<std::uint8_t> is_refused(size, 0);
  workers.run(count, num_threads, poll, [&](std::int64_t number) {
    const auto sample = static_cast<std::size_t>(number);
    const auto source = static_cast<std::size_t>(datasets[sample]);
    const bool is_placed = datasets[sample] >= 0 && source < sources.size();
    is_refused[sample] =
        is_placed && plan_sentences(sources[source], files, positions[sample], plans[sample]) != Planned::refused ? 0
                                                                                                                  : 1;
  });
  Gathered found{count, {}, {}};
  for (const SentenceSpans& plan : plans) {
    found.absent.insert(found.absent.end(), plan.absent.begin(), plan.absent.end());
    found.missing.insert(found.missing.end(), plan.missing.begin(), plan.missing.end());
  }
  const Batch batch(rules, rows, level);
  if (rows.text != nullptr && found.absent.empty() && found.missing.empty() &&
      std::find(is_refused.begin(), is_refused.end(), 1) == is_refused.end()) {
    workers.run(count, num_threads, poll, [&](std::int64_t number) {
      const auto sample = static_cast<std::size_t>(number);
      const std::int64_t dtype = sources[static_cast<std::size_t>(datasets[sample])].dtype;
      is_refused[sample] = batch.write(sample, dtype, positions[sample], plans[sample]) ? 0 : 1;
    });
  }
  found.refused = std::find(is_refused.begin(), is_refused.end(), 1) - is_refused.begin();
  return found;
}

}  // namespace trackbed
