#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "trackbed/poll.hpp"

namespace trackbed {

// Consecutive sentences of a document, [first, stop), in 64-bit words.
struct Sentences {
  std::int64_t first;
  std::int64_t stop;
};

// How documents are cut into samples, as by Megatron Core's `build_mapping`. In 64-bit words.
struct MappingRules {
  std::int64_t num_epochs;     // most epochs, at least 1
  std::uint64_t num_samples;   // no further epoch is begun once there are as many rows
  std::int64_t max_length;     // tokens of a sample, at least 1; at least 2 if `ratio` is above 0
  std::int64_t ratio;          // one sample in `ratio` is short, with a random length of at least 2; 0 for none
  std::int64_t seed;           // in [0, 2^31 - 1)
  std::int64_t min_sentences;  // fewest sentences of a sample, at least 1
};

// Writes the sentences of the documents that samples may be made of, and returns how many there are: those of at least
// `min_sentences`, of which none has more than 512 tokens, if there are several. Document d has the sentences
// [borders[d], borders[d + 1]); `lengths` are int32 tokens of each sentence, which may be unaligned.
// Requires: borders do not decrease, and are in [0, number of sentences]; space for as many as there are documents.
std::size_t find_documents(std::span<const std::int64_t> borders, std::span<const std::byte> lengths,
                           std::int64_t min_sentences, std::span<Sentences> documents, Poll& poll);

// Rows of a mapping: the first sentence of a sample, the one after its last, and the number of tokens that it is to
// have. The memory is malloc()'s, and belongs to the caller.
template <class Number>
struct Mapping {
  Number* numbers;
  std::size_t num_rows;
};

// Makes the mapping of documents, shuffled; without documents it has no rows. Throws std::bad_alloc.
template <class Number>
Mapping<Number> build_mapping(std::span<const Sentences> documents, std::span<const std::byte> lengths,
                              const MappingRules& rules, Poll& poll);

}  // namespace trackbed
