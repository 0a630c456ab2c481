#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace trackbed {

// One pair of files, in 64-bit words. Lengths and pointers may lie at any address: an index file has them at odd ones.
struct TokenFile {
  const std::byte* tokens;    // the mapped `.bin`; null until somebody maps it
  std::int64_t size_bytes;    // bytes that are mapped
  const std::byte* lengths;   // int32 tokens of each sequence
  const std::byte* pointers;  // int64 byte of each sequence in the `.bin`
  std::int64_t num_sequences;
  std::int64_t first_sequence;  // sequences of all files of the dataset before this one
  std::int64_t first_byte;      // token bytes of all files of the dataset before this one
  std::int64_t token_bytes;     // its own
};

// One dataset, in 64-bit words. With `visits` a sample is cut from the documents that are visited in turn, as in the
// orders "megatron" and "balanced"; without, it is a stretch of the files, as in the order "instant".
struct SampleSource {
  std::int64_t first_file;
  std::int64_t num_files;  // at least 1
  std::int64_t dtype;      // code of the token type in an index file: an integer type
  std::int64_t num_samples;
  std::int64_t origin_byte;  // where sample 0 of a dataset without visits begins, over all files
  const std::byte* visits;
  std::int64_t num_visits;
  std::int64_t visit_bytes;  // 4 or 8, as those below
  const std::byte* rows;     // num_samples + 1 pairs: visit and token offset inside it where each sample begins
  std::int64_t row_bytes;
  const std::byte* shuffle;  // num_samples rows: unsigned where they are narrow
  std::int64_t shuffle_bytes;
  std::int64_t may_be_short;  // 1 if the last row's sample may end with the visits before it is full, else 0
};

// Tokens next to each other in memory.
struct Span {
  const std::byte* tokens;
  std::int64_t count;
};

enum class Planned {
  whole,    // all spans lie inside the mapped files
  absent,   // a file that the sample needs is not mapped yet
  refused,  // the sample is not there, not inside the files, or its documents do not make it up
};

// What one sample is cut from.
struct SampleSpans {
  std::vector<Span> spans;
  std::vector<std::int64_t> borders;  // tokens from the sample's start to where each sequence ends, in their order
  std::vector<std::int64_t> absent;   // files that are to be mapped
};

// Bytes of a token of this type, or 0 where it is no integer type of an index file.
std::int64_t token_bytes_of(std::int64_t dtype);

// Where the sample at a position of the shuffled order lies, counted from the end if it is below 0, or, without visits,
// the one of that number in the files.
// It has `length` tokens, of which the last `extra` (0 or 1) belong to the next sample, too; fewer only in the last
// row, where that may be short. Arrays that contradict each other, so that the documents do not make up the sample,
// refuse it. Every span is checked against the bytes that are mapped: whatever the files and arrays say, none leads
// outside. Nothing is read of the tokens. Requires: arrays as long as `source` and `files` say. O(visits of the sample
// + log(sequences)).
Planned plan_spans(const SampleSource& source, std::span<const TokenFile> files, std::int64_t position,
                   std::int64_t length, std::int64_t extra, SampleSpans& plan);

// A plan reads one array after the other, each where the one before says: of a sample that is planned alone every look
// waits for memory. This asks for what a later step will read, without waiting for it, if all samples of a batch take
// step 0, then all step 1, up to kApproachSteps. Does nothing where there are no visits.
// Requires: as plan_spans().
constexpr int kApproachSteps = 4;
void approach_plan(const SampleSource& source, std::span<const TokenFile> files, std::int64_t position, int step);

}  // namespace trackbed
