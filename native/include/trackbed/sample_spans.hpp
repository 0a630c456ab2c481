#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace trackbed {

// One pair of files, in 64-bit words. Lengths and pointers may be unaligned, as in an index file.
struct TokenFile {
  const std::byte* tokens;    // the mapped `.bin`; null if it is not mapped
  std::int64_t size_bytes;    // size of the `.bin`
  const std::byte* lengths;   // int32 tokens of each sequence; null if the file is absent
  const std::byte* pointers;  // int64 byte offset of each sequence in the `.bin`
  std::int64_t num_sequences;
  std::int64_t first_sequence;  // number of sequences in the dataset's earlier files
  std::int64_t first_byte;      // number of token bytes in the dataset's earlier files
  std::int64_t token_bytes;     // number of token bytes in this file
};

// Bytes [start, stop) of the `.bin` of a file that is not mapped but in an object store.
struct Fetched {
  std::int64_t file;
  std::int64_t start;
  std::int64_t stop;
  const std::byte* bytes;
};

// Files, and what was fetched of those that are not mapped, by file and start.
struct TokenFiles {
  std::span<const TokenFile> files;
  std::span<const Fetched> fetched;
};

// Bytes [start, stop) of a file that a sample needs, and that were not fetched.
struct Missing {
  std::int64_t file;
  std::int64_t start;
  std::int64_t stop;
};

// One dataset, in 64-bit words. With `visits` a sample is cut from the visited documents, as in the orders "megatron"
// and "balanced"; without, it is a stretch of the files, as in the order "instant".
struct SampleSource {
  std::int64_t first_file;
  std::int64_t num_files;  // at least 1
  std::int64_t dtype;      // code of the token type in index files, an integer type
  std::int64_t num_samples;
  std::int64_t origin_byte;  // start of sample 0 of a dataset without visits, in the concatenated files
  const std::byte* visits;
  std::int64_t num_visits;
  std::int64_t visit_bytes;  // 4 or 8, as row_bytes and shuffle_bytes
  // With visits, num_samples + 1 pairs: visit, and token offset in that visit, of each sample's start. Of a dataset of
  // sentences, num_samples times, unsigned: the first sentence, the one after the last, and the sample's length.
  const std::byte* rows;
  std::int64_t row_bytes;
  const std::byte* shuffle;  // num_samples row numbers, unsigned if they have 4 bytes
  std::int64_t shuffle_bytes;
  std::int64_t may_be_short;  // 1 if the sample of the last row may be shorter because the visits end, else 0
};

// Contiguous tokens in memory.
struct Span {
  const std::byte* tokens;
  std::int64_t count;
};

enum class Planned {
  whole,    // all spans lie inside the files
  absent,   // a file that the sample needs is absent, or bytes of it are missing
  refused,  // the sample does not exist, lies outside the files, or its documents do not have its length
};

// Spans from which one sample is cut.
struct SampleSpans {
  std::vector<Span> spans;
  std::vector<std::int64_t> borders;  // tokens from the sample's start to the end of each sequence, in order; without
                                      // its own end in a stretch
  std::vector<std::int64_t> absent;   // files that must be opened
  std::vector<Missing> missing;       // bytes that must be fetched, if no file is absent
};

// Sentences of one sample.
struct SentenceSpans {
  std::vector<Span> spans;           // each sentence, empty ones included
  std::vector<std::int64_t> absent;  // files that must be opened
  std::vector<Missing> missing;      // bytes that must be fetched, if no file is absent
  std::int64_t target;               // length of the sample, above 0
};

// Bytes per token of this type, or 0 if it is not an integer type of index files.
std::int64_t token_bytes_of(std::int64_t dtype);

// Finds the spans of a sample. With visits, `position` is a position of the shuffled order, counted from the end if it
// is below 0; without visits, it is the number of the sample in the files.
// The sample has `length` tokens, of which the last `extra` (0 or 1) also belong to the next sample; only the sample of
// the last row may have fewer, if it may be short. It is refused if the arrays are inconsistent, so that its documents
// do not have this length. Every span is checked against the size of its file, so no contents of files or arrays lead
// outside of it. Tokens are not read.
// Requires: arrays of the lengths given in `source` and `files`. O(visits of the sample + log(sequences)).
Planned plan_spans(const SampleSource& source, const TokenFiles& files, std::int64_t position, std::int64_t length,
                   std::int64_t extra, SampleSpans& plan);

// Finds the sentences of a sample of a dataset of sentences, at a position that is counted from the end if it is below
// 0. Every span is checked as by plan_spans(). Requires: as plan_spans(). O(sentences of the sample + log(files)).
Planned plan_sentences(const SampleSource& source, const TokenFiles& files, std::int64_t position, SentenceSpans& plan);

// Part of a document in a pack: inputs are its tokens [start, stop), labels are those one further.
struct PackedPiece {
  std::int64_t document;
  std::int64_t start;
  std::int64_t stop;
};

// Where a document is: number of the file, and of the sequence in it. A sequence outside of the file says that no file
// has the document.
struct FileSequence {
  std::int64_t file;
  std::int64_t sequence;
};

// Finds a document of a source. O(log(files)).
FileSequence find_sequence(const SampleSource& source, std::span<const TokenFile> files, std::int64_t document);

// Finds the spans of the pieces of a pack, each with the token behind its last input. Every span is checked as by
// plan_spans(). Requires: as plan_spans(). O(pieces * log(files)).
Planned plan_pieces(const SampleSource& source, const TokenFiles& files, std::span<const PackedPiece> pieces,
                    SampleSpans& plan);

// Prefetches what plan_pieces() reads of the index.
void approach_pieces(const SampleSource& source, std::span<const TokenFile> files, std::span<const PackedPiece> pieces);

// Prefetches tokens of scattered spans, so that their cache misses overlap.
void prefetch_tokens(std::span<const Span> spans, std::int64_t token_bytes);

// Asks the system to read long spans of mapped files that are not in memory, and does not wait: a map that is read at
// random (MADV_RANDOM) would otherwise wait for each page of a span in turn. A hint: short spans are left to page
// faults, as the call would cost more than their copy. O(bytes of long spans / 128 KiB).
void read_ahead_long(std::span<const Span> spans, std::int64_t token_bytes);

// Prefetches memory for plan_spans(), whose reads depend on each other, so that each would otherwise wait for memory.
// Step s prefetches what step s + 1 reads: to be called with step 0 for all samples of a batch, then with step 1 for
// all, and so on below kApproachSteps. Does nothing without visits.
// Requires: as plan_spans().
constexpr int kApproachSteps = 4;
void approach_plan(const SampleSource& source, std::span<const TokenFile> files, std::int64_t position, int step);

}  // namespace trackbed
