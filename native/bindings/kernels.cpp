#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python.hpp"
#include "trackbed/balanced_blend.hpp"
#include "trackbed/blend.hpp"
#include "trackbed/block_permutation.hpp"
#include "trackbed/gather.hpp"
#include "trackbed/gather_masked.hpp"
#include "trackbed/gather_packs.hpp"
#include "trackbed/instant.hpp"
#include "trackbed/interleaving.hpp"
#include "trackbed/isa.hpp"
#include "trackbed/least_loaded.hpp"
#include "trackbed/legacy_shuffle.hpp"
#include "trackbed/narrow.hpp"
#include "trackbed/numpy_random.hpp"
#include "trackbed/pack_balance.hpp"
#include "trackbed/pack_borders.hpp"
#include "trackbed/packing.hpp"
#include "trackbed/permutation.hpp"
#include "trackbed/sample_index.hpp"
#include "trackbed/sentence_mapping.hpp"
#include "trackbed/small_indices.hpp"
#include "trackbed/split_mix.hpp"
#include "trackbed/square_sum.hpp"
#include "trackbed/sum_ranks.hpp"
#include "trackbed/token_count.hpp"
#include "trackbed/workers.hpp"

namespace nb = nanobind;

using trackbed::python::Array;
using trackbed::python::Buffers;
using trackbed::python::poll_of;
using trackbed::python::span_of;
using trackbed::python::structures_of;

namespace {

std::string compiler() {
#if defined(__clang__)
  const auto& [name, numbers] = std::pair("Clang ", std::array{__clang_major__, __clang_minor__, __clang_patchlevel__});
#else
  const auto& [name, numbers] = std::pair("GCC ", std::array{__GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__});
#endif
  return name + std::to_string(numbers[0]) + "." + std::to_string(numbers[1]) + "." + std::to_string(numbers[2]);
}

using TwisterWords =
    nb::ndarray<std::uint32_t, nb::shape<sizeof(trackbed::MersenneTwister) / 4>, nb::c_contig, nb::device::cpu>;

trackbed::MersenneTwister& twister_of(const TwisterWords& words) {
  return *reinterpret_cast<trackbed::MersenneTwister*>(words.data());
}

template <class Element>
void legacy_shuffle(TwisterWords twister, Array<Element> array, int level, nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  const nb::gil_scoped_release no_gil;
  trackbed::legacy_shuffle<Element>(twister_of(twister), span_of(array), static_cast<trackbed::Isa>(level), poll);
}

void permute(std::uint64_t size, std::uint64_t key, Array<const std::int64_t> positions, Array<std::int64_t> images,
             int level, int num_threads, nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  const nb::gil_scoped_release no_gil;
  trackbed::permute(trackbed::make_permutation(size, key), span_of(positions), span_of(images),
                    static_cast<trackbed::Isa>(level), num_threads, poll);
}

std::uint64_t find_position(std::uint64_t size, std::uint64_t key, std::uint64_t image) {
  return trackbed::find_position(trackbed::make_permutation(size, key), image);
}

void permute_blocks(std::uint64_t size, std::uint64_t key, std::uint64_t block, std::uint64_t window,
                    Array<const std::int64_t> positions, Array<std::int64_t> images, int level, int num_threads,
                    nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  const nb::gil_scoped_release no_gil;
  trackbed::permute(trackbed::make_block_permutation(size, key, block, window), span_of(positions), span_of(images),
                    static_cast<trackbed::Isa>(level), num_threads, poll);
}

template <class Id>
void greedy_blend(Array<const double> weights, Array<Id> dataset_index, Array<std::int64_t> dataset_sample_index,
                  int level, nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  const nb::gil_scoped_release no_gil;
  trackbed::greedy_blend<Id>(span_of(weights), span_of(dataset_index), span_of(dataset_sample_index),
                             static_cast<trackbed::Isa>(level), poll);
}

template <class Id>
void exhaustive_blend(Array<const std::int64_t> sizes, Array<Id> dataset_index,
                      Array<std::int64_t> dataset_sample_index, int level, nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  const nb::gil_scoped_release no_gil;
  trackbed::exhaustive_blend<Id>(span_of(sizes), span_of(dataset_index), span_of(dataset_sample_index),
                                 static_cast<trackbed::Isa>(level), poll);
}

template <class Id, class Sample>
void balanced_blend(Array<const std::int64_t> sizes, std::uint64_t key, Array<Id> dataset_index,
                    Array<Sample> dataset_sample_index, int level, int num_threads, nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  const nb::gil_scoped_release no_gil;
  trackbed::balanced_blend<Id, Sample>(span_of(sizes), trackbed::make_permutation(dataset_index.size(), key),
                                       span_of(dataset_index), span_of(dataset_sample_index),
                                       static_cast<trackbed::Isa>(level), num_threads, poll);
}

template <class Visit, class Row>
std::size_t sample_index(Array<const std::uint8_t> lengths, Array<const Visit> visits, std::int64_t sequence_length,
                         std::int64_t extra_token, Array<Row> rows, std::int64_t num_threads, nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  const nb::gil_scoped_release no_gil;
  return trackbed::sample_index<Visit, Row>(std::as_bytes(span_of(lengths)), span_of(visits), sequence_length,
                                            extra_token, span_of(rows), num_threads, poll);
}

void pair_lengths(Array<const std::int32_t> documents, Array<const std::uint8_t> lengths, Array<std::uint64_t> pairs,
                  nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  const nb::gil_scoped_release no_gil;
  trackbed::pair_lengths(span_of(documents), std::as_bytes(span_of(lengths)), span_of(pairs), poll);
}

std::size_t cut_pairs(Array<const std::uint64_t> pairs, Array<std::int32_t> documents, std::int64_t sequence_length,
                      std::int64_t extra_token, Array<std::int32_t> rows, std::int64_t num_threads,
                      nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  const nb::gil_scoped_release no_gil;
  return trackbed::cut_pairs(span_of(pairs), span_of(documents), sequence_length, extra_token, span_of(rows),
                             num_threads, poll);
}

std::pair<std::int64_t, std::int32_t> count_tokens(Array<const std::uint8_t> lengths) {
  const nb::gil_scoped_release no_gil;
  const trackbed::TokenCount count = trackbed::count_tokens(std::as_bytes(span_of(lengths)));
  return {count.tokens, count.shortest};
}

std::size_t small_indices(Array<const std::int64_t> datasets, nb::list lengths, Array<std::uint32_t> indices, int level,
                          nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  const Buffers buffers(lengths);
  const auto described = structures_of<const trackbed::SmallDataset>(datasets);
  const nb::gil_scoped_release no_gil;
  return trackbed::small_indices(described, buffers.spans(), span_of(indices), static_cast<trackbed::Isa>(level), poll);
}

using Words = Array<const std::uint64_t>;

nb::object permutations_of(Array<const std::int64_t> sizes) {
  const std::size_t words = sizes.size() * sizeof(trackbed::Permutation) / sizeof(std::uint64_t);
  auto* permutations = new trackbed::Permutation[sizes.size()];
  const nb::capsule owner(permutations, [](void* p) noexcept { delete[] static_cast<trackbed::Permutation*>(p); });
  for (std::size_t dataset = 0; dataset < sizes.size(); ++dataset) {
    permutations[dataset] = trackbed::make_permutation(static_cast<std::uint64_t>(sizes.data()[dataset]), 0);
  }
  return nb::cast(nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<1>>(reinterpret_cast<std::uint64_t*>(permutations),
                                                                     {words}, owner));
}

// The words of structures, in an array that owns them.
template <class Word, class Structure>
nb::object words_of(std::vector<Structure>&& structures) {
  static_assert(sizeof(Structure) % sizeof(Word) == 0 && alignof(Word) <= alignof(Structure));
  const std::size_t words = structures.size() * sizeof(Structure) / sizeof(Word);
  auto* kept = new std::vector<Structure>(std::move(structures));
  const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<Structure>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, Word, nb::ndim<1>>(reinterpret_cast<Word*>(kept->data()), {words}, owner));
}

std::tuple<nb::object, nb::object, std::uint64_t> plan_packs(Words counts, std::uint64_t most_items) {
  trackbed::PackPlan plan;
  {
    const nb::gil_scoped_release no_gil;
    plan = trackbed::plan_packs(span_of(counts), most_items);
  }
  return {words_of<std::uint64_t>(std::move(plan.nodes)), words_of<std::uint64_t>(std::move(plan.leaves)),
          plan.num_packs};
}

trackbed::PackShape pack_shape_of(const std::tuple<std::uint64_t, std::uint64_t, int>& shape) {
  const auto& [sequence_length, multiple, long_documents] = shape;
  return {sequence_length, multiple, static_cast<trackbed::LongDocuments>(long_documents)};
}

void count_items(Array<const std::int32_t> lengths, const std::tuple<std::uint64_t, std::uint64_t, int>& shape,
                 Array<std::uint64_t> counts) {
  const nb::gil_scoped_release no_gil;
  trackbed::count_items(span_of(lengths), pack_shape_of(shape), span_of(counts));
}

void sort_items(Array<const std::int32_t> lengths, const std::tuple<std::uint64_t, std::uint64_t, int>& shape,
                Words counts, Array<std::uint32_t> documents) {
  const nb::gil_scoped_release no_gil;
  trackbed::sort_items(span_of(lengths), pack_shape_of(shape), span_of(counts), span_of(documents));
}

// [3 N] document, start and stop of each piece, and how many pieces there are before each pack. `pack_of(i)` returns
// the number and the key of pack i.
template <typename PackOf>
std::tuple<nb::object, nb::object> find_all(const trackbed::PackTables& tables, const trackbed::PackShape& shape,
                                            std::size_t size, const PackOf& pack_of) {
  std::vector<trackbed::PackedPiece> pieces;
  std::vector<std::int64_t> firsts(size + 1, 0);
  {
    const nb::gil_scoped_release no_gil;
    for (std::size_t i = 0; i < size; ++i) {
      const auto [pack, key] = pack_of(i);
      trackbed::find_pack(tables, shape, pack, key, pieces);
      firsts[i + 1] = static_cast<std::int64_t>(pieces.size());
    }
  }
  return {words_of<std::int64_t>(std::move(pieces)), words_of<std::int64_t>(std::move(firsts))};
}

std::tuple<nb::object, nb::object> find_packs(Words nodes, Words leaves, Words first_items,
                                              Array<const std::uint32_t> documents, Array<const std::int32_t> lengths,
                                              const std::tuple<std::uint64_t, std::uint64_t, int>& shape, Words packs,
                                              Words keys) {
  const trackbed::PackTables tables{structures_of<const trackbed::PackNode>(nodes),
                                    structures_of<const trackbed::PackLeaf>(leaves), span_of(first_items),
                                    span_of(documents), span_of(lengths)};
  return find_all(tables, pack_shape_of(shape), packs.size(),
                  [&](std::size_t i) { return std::pair{packs.data()[i], keys.data()[i]}; });
}

// The packs of visits epoch x num_packs + pack, in epochs whose keys are words of a stream.
std::tuple<nb::object, nb::object> find_visits(Words nodes, Words leaves, Words first_items,
                                               Array<const std::uint32_t> documents, Array<const std::int32_t> lengths,
                                               const std::tuple<std::uint64_t, std::uint64_t, int>& shape,
                                               std::uint64_t num_packs, std::uint64_t seed,
                                               Array<const std::int64_t> visits) {
  const trackbed::PackTables tables{structures_of<const trackbed::PackNode>(nodes),
                                    structures_of<const trackbed::PackLeaf>(leaves), span_of(first_items),
                                    span_of(documents), span_of(lengths)};
  return find_all(tables, pack_shape_of(shape), visits.size(), [&](std::size_t i) {
    const auto visit = static_cast<std::uint64_t>(visits.data()[i]);
    return std::pair{visit % num_packs, trackbed::split_mix(seed, visit / num_packs)};
  });
}

using Borders = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// [3 (n + 1) + 1] joined borders and the longest document; the sums of trained labels and of documents; and the number
// of padded places.
std::tuple<nb::object, nb::object, std::int64_t> join_borders(Borders places, Borders padded, Borders trained,
                                                              Array<const std::int32_t> longest,
                                                              Array<const std::int64_t> num_trained,
                                                              Array<const std::int64_t> num_documents, bool keeps_all) {
  const auto row = [](const Borders& borders) { return std::span{borders.data(), borders.size()}; };
  auto [borders, num_places] =
      trackbed::join_borders({{row(places), row(padded), row(trained)}, padded.shape(0), padded.shape(1)}, keeps_all);
  const auto sum = [](const auto& numbers) {
    return std::accumulate(numbers.data(), numbers.data() + numbers.size(), std::int64_t{0});
  };
  borders.back() = std::accumulate(longest.data(), longest.data() + longest.size(), std::int32_t{0},
                                   [](std::int32_t one, std::int32_t other) { return std::max(one, other); });
  std::vector<std::int64_t> counts{sum(num_trained), sum(num_documents)};
  return {words_of<std::int32_t>(std::move(borders)), words_of<std::int64_t>(std::move(counts)), num_places};
}

void leaf_costs(Words nodes, Words leaves, std::uint64_t multiple, std::uint64_t linear, Array<std::int64_t> costs) {
  const nb::gil_scoped_release no_gil;
  trackbed::leaf_costs(structures_of<const trackbed::PackNode>(nodes), structures_of<const trackbed::PackLeaf>(leaves),
                       multiple, linear, span_of(costs));
}

void find_costs(Words first_packs, Array<const std::int64_t> leaf_costs, Words packs, Array<std::int64_t> costs) {
  const nb::gil_scoped_release no_gil;
  trackbed::find_costs(span_of(first_packs), span_of(leaf_costs), span_of(packs), span_of(costs));
}

void deal_packs(Array<const std::int64_t> costs, std::size_t num_ranks, Array<std::int64_t> dealt) {
  const nb::gil_scoped_release no_gil;
  trackbed::deal_packs(span_of(costs), num_ranks, span_of(dealt));
}

void instant_locate(Words nodes, Array<const std::int64_t> first_samples, Array<const std::int64_t> first_nodes,
                    Array<const std::uint32_t> roots, Array<const std::int64_t> ramps,
                    Array<const std::uint32_t> parents, Words permutations, Words keys, std::uint64_t block,
                    std::uint64_t window, Array<const std::int64_t> positions, Array<std::int32_t> datasets,
                    Array<std::int64_t> draws, Array<std::int64_t> samples, int num_threads, nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  const nb::gil_scoped_release no_gil;
  trackbed::instant_locate({structures_of<const trackbed::InterleavingNode>(nodes), span_of(first_samples),
                            span_of(first_nodes), span_of(roots), span_of(ramps), span_of(parents)},
                           {structures_of<const trackbed::Permutation>(permutations), span_of(keys), block, window},
                           span_of(positions), span_of(datasets), span_of(draws), span_of(samples), num_threads, poll);
}

void draw_phases(Array<std::uint64_t> nodes, std::size_t num_leaves, std::uint64_t key) {
  trackbed::draw_phases(structures_of<trackbed::InterleavingNode>(nodes), num_leaves, key);
}

void interleaving_counts(Words nodes, std::uint32_t root, std::int64_t position, Array<std::int64_t> counts) {
  trackbed::interleaving_counts(structures_of<const trackbed::InterleavingNode>(nodes), root, position,
                                span_of(counts));
}

// A capsule, because Python may destroy the pool at any time, and a forked child must not join its threads.
nb::capsule new_workers() {
  return {new trackbed::Workers, [](void* workers) noexcept { delete static_cast<trackbed::Workers*>(workers); }};
}

// The first refused sample, absent files, and [M, 3] file, start and stop of missing bytes.
using Outcome = std::tuple<std::int64_t, std::vector<std::int64_t>, std::vector<std::int64_t>>;

Outcome outcome_of(const trackbed::Gathered& found) {
  std::vector<std::int64_t> missing;
  missing.reserve(3 * found.missing.size());
  for (const trackbed::Missing& one : found.missing) {
    missing.insert(missing.end(), {one.file, one.start, one.stop});
  }
  return {found.refused, found.absent, std::move(missing)};
}

trackbed::TokenFiles files_of(const Words& files, const Words& fetched) {
  return {structures_of<const trackbed::TokenFile>(files), structures_of<const trackbed::Fetched>(fetched)};
}

Outcome gather(nb::capsule workers, Words sources, Words files, Words fetched, Array<const std::int32_t> datasets,
               Array<const std::int64_t> positions, Words shape, Words rows, int level, int num_threads,
               nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  auto& its_workers = *static_cast<trackbed::Workers*>(workers.data());
  const nb::gil_scoped_release no_gil;
  const trackbed::Gathered found =
      trackbed::gather(structures_of<const trackbed::SampleSource>(sources), files_of(files, fetched),
                       span_of(datasets), span_of(positions), structures_of<const trackbed::SampleShape>(shape).front(),
                       structures_of<const trackbed::BatchRows>(rows).front(), static_cast<trackbed::Isa>(level),
                       num_threads, its_workers, poll);
  return outcome_of(found);
}

Outcome gather_packs(nb::capsule workers, Words sources, Words files, Words fetched, Words trained,
                     Array<const std::int32_t> datasets, Array<const std::int64_t> pieces,
                     Array<const std::int64_t> firsts, Words shape, Words rows, int level, int num_threads,
                     nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  auto& its_workers = *static_cast<trackbed::Workers*>(workers.data());
  const nb::gil_scoped_release no_gil;
  const trackbed::Gathered found =
      trackbed::gather_packs(structures_of<const trackbed::SampleSource>(sources), files_of(files, fetched),
                             structures_of<const trackbed::TrainedRuns>(trained), span_of(datasets),
                             structures_of<const trackbed::PackedPiece>(pieces), span_of(firsts),
                             structures_of<const trackbed::PackedShape>(shape).front(),
                             structures_of<const trackbed::PackedRows>(rows).front(), static_cast<trackbed::Isa>(level),
                             num_threads, its_workers, poll);
  return outcome_of(found);
}

Outcome gather_masked(nb::capsule workers, Words sources, Words files, Words fetched,
                      Array<const std::int32_t> datasets, Array<const std::int64_t> positions, Words rules, Words rows,
                      int level, int num_threads, nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  auto& its_workers = *static_cast<trackbed::Workers*>(workers.data());
  const nb::gil_scoped_release no_gil;
  const trackbed::Gathered found = trackbed::gather_masked(
      structures_of<const trackbed::SampleSource>(sources), files_of(files, fetched), span_of(datasets),
      span_of(positions), structures_of<const trackbed::MaskingRules>(rules).front(),
      structures_of<const trackbed::MaskedRows>(rows).front(), static_cast<trackbed::Isa>(level), num_threads,
      its_workers, poll);
  return outcome_of(found);
}

// Draws of one stream in turn, each by its kind: 0 random(), 1 randint(0, argument), 2 geometric(argument), 3 choice()
// by `cumulative`, 4 shuffle() of the numbers below the argument, of which the sum of number times position is the
// result.
void legacy_draws(std::uint32_t seed, Array<const std::uint8_t> kinds, Array<const double> arguments,
                  Array<const double> cumulative, Array<double> results, int level) {
  trackbed::NumpyRandom random(seed, static_cast<trackbed::Isa>(level));
  std::vector<std::uint32_t> numbers;
  for (std::size_t draw = 0; draw < kinds.size(); ++draw) {
    const double argument = arguments(draw);
    double& result = results(draw);
    switch (kinds(draw)) {
      case 0:
        result = random.random();
        break;
      case 1:
        result = random.up_to(static_cast<std::uint32_t>(argument) - 1);
        break;
      case 2:
        result = random.geometric(argument);
        break;
      case 3:
        result = static_cast<double>(random.choice(span_of(cumulative)));
        break;
      default:
        numbers.resize(static_cast<std::size_t>(argument));
        std::iota(numbers.begin(), numbers.end(), 0U);
        random.shuffle(std::span(numbers));
        result = 0;
        for (std::size_t at = 0; at < numbers.size(); ++at) {
          result += static_cast<double>(at) * numbers[at];
        }
    }
  }
}

using AnyVector = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Calls `use` with a value of the integer type `dtype`. Returns true if it is one of `Types`.
template <class... Types, class Use>
bool with_integer(nb::dlpack::dtype dtype, Use use) {
  return ((dtype == nb::dtype<Types>() && (use(Types{}), true)) || ...);
}

// Calls `use` with a value of the integer type of a NumPy type character. Returns true if the character is known.
template <class Use>
bool with_character(char character, Use use) {
  switch (character) {
    case 'b':
      return use(std::int8_t{}), true;
    case 'B':
      return use(std::uint8_t{}), true;
    case 'h':
      return use(std::int16_t{}), true;
    case 'H':
      return use(std::uint16_t{}), true;
    case 'i':
      return use(std::int32_t{}), true;
    case 'l':
    case 'q':
      return use(std::int64_t{}), true;
    default:
      return false;
  }
}

// Converts numbers to bytes of another type. Returns the bytes, and the index of the first number that does not fit.
// Returns bytes because a document has a few hundred tokens, for which creating an array would take as long again.
std::pair<nb::object, std::size_t> narrow(AnyVector source, char target) {
  nb::object bytes;
  std::size_t first = 0;
  const bool known = with_character(target, [&](auto to) {
    using To = decltype(to);
    bytes = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(source.size() * sizeof(To))));
    if (!bytes.is_valid()) {
      throw nb::python_error();
    }
    auto* stored = reinterpret_cast<To*>(PyBytes_AsString(bytes.ptr()));
    const bool integers = with_integer<std::int64_t, std::int32_t, std::uint16_t, std::uint32_t, std::uint8_t,
                                       std::int16_t, std::int8_t, std::uint64_t>(source.dtype(), [&](auto from) {
      using From = decltype(from);
      const std::span<const From> numbers{static_cast<const From*>(source.data()), source.size()};
      const nb::gil_scoped_release no_gil;
      first = trackbed::narrow<From, To>(numbers, {stored, source.size()});
    });
    if (!integers) {
      throw nb::type_error("source must hold integers");
    }
  });
  if (!known) {
    throw nb::type_error("target must be an integer type");
  }
  return {bytes, first};
}

// `owner` is the rank whose buffer gets the sum, -1 for all.
void sum_ranks(nb::list buffers, std::int64_t number, std::size_t start, std::size_t stop, double factor,
               double divisor, std::int64_t owner, int level, int num_threads, nb::handle callback) {
  std::vector<std::byte*> first;
  for (const nb::handle buffer : buffers) {
    first.push_back(
        static_cast<std::byte*>(nb::cast<nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu>>(buffer).data()));
  }
  const trackbed::RankSum sum{.buffers = first.data(),
                              .num_ranks = first.size(),
                              .number = static_cast<trackbed::Number>(number),
                              .start = start,
                              .stop = stop,
                              .factor = factor,
                              .divisor = divisor,
                              .owner = static_cast<std::size_t>(owner)};
  trackbed::Poll poll = poll_of(callback);
  const nb::gil_scoped_release no_gil;
  trackbed::sum_ranks(sum, static_cast<trackbed::Isa>(level), num_threads, poll);
}

void square_sum(AnyVector numbers, std::int64_t type, Array<std::int64_t> sum, int level, int num_threads,
                nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  const nb::gil_scoped_release no_gil;
  trackbed::square_sum(static_cast<const std::byte*>(numbers.data()), static_cast<trackbed::Number>(type),
                       numbers.size(), span_of(sum), static_cast<trackbed::Isa>(level), num_threads, poll);
}

void assign_least_loaded(Array<const std::int64_t> costs, Array<const std::int64_t> first,
                         Array<const std::int64_t> end, Array<const std::int64_t> ranks, Array<std::int64_t> loads,
                         Array<std::int64_t> chosen) {
  const nb::gil_scoped_release no_gil;
  trackbed::assign_least_loaded(span_of(costs), span_of(first), span_of(end), span_of(ranks), span_of(loads),
                                span_of(chosen));
}

std::size_t find_documents(Array<const std::int64_t> borders, Array<const std::uint8_t> lengths,
                           std::int64_t min_sentences, Array<std::int64_t> documents, nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  const auto found = structures_of<trackbed::Sentences>(documents);
  const nb::gil_scoped_release no_gil;
  return trackbed::find_documents(span_of(borders), std::as_bytes(span_of(lengths)), min_sentences, found, poll);
}

template <class Number>
nb::object mapping_of(Array<const std::int64_t> documents, Array<const std::uint8_t> lengths,
                      Array<const std::int64_t> rules, trackbed::Poll& poll) {
  const auto made = [&] {
    const auto described = structures_of<const trackbed::Sentences>(documents);
    const nb::gil_scoped_release no_gil;
    return trackbed::build_mapping<Number>(described, std::as_bytes(span_of(lengths)),
                                           structures_of<const trackbed::MappingRules>(rules)[0], poll);
  }();
  const nb::capsule owner(made.numbers, [](void* numbers) noexcept { std::free(numbers); });
  return nb::cast(nb::ndarray<nb::numpy, Number>(made.numbers, {made.num_rows, 3}, owner));
}

nb::object build_mapping(Array<const std::int64_t> documents, Array<const std::uint8_t> lengths,
                         Array<const std::int64_t> rules, bool is_wide, nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  return is_wide ? mapping_of<std::uint64_t>(documents, lengths, rules, poll)
                 : mapping_of<std::uint32_t>(documents, lengths, rules, poll);
}

}  // namespace

NB_MODULE(_native, m) {
  const auto poll = nb::arg("poll").none();
  m.def("sum_ranks", &sum_ranks, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), poll);
  m.def("square_sum", &square_sum, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), poll);
  m.def("assign_least_loaded", &assign_least_loaded);
  m.def("find_documents", &find_documents, nb::arg(), nb::arg(), nb::arg(), nb::arg(), poll);
  m.def("build_mapping", &build_mapping, nb::arg(), nb::arg(), nb::arg(), nb::arg(), poll);
  m.attr("SQUARE_SUM_SIZE") = trackbed::kSquareSumSize;
  m.def("best_isa", [] { return static_cast<int>(trackbed::best_isa()); });
  m.attr("compiler") = nb::str(compiler().c_str());
  m.def("small_indices", &small_indices, nb::arg(), nb::arg(), nb::arg(), nb::arg(), poll);
  m.def("narrow", &narrow);
  m.def("count_tokens", &count_tokens);
  m.def("seed_twister", [](TwisterWords twister, std::uint32_t seed) { trackbed::seed(twister_of(twister), seed); });
  m.def("legacy_shuffle", &legacy_shuffle<std::uint32_t>, nb::arg(), nb::arg(), nb::arg(), poll);
  m.def("legacy_shuffle", &legacy_shuffle<std::uint64_t>, nb::arg(), nb::arg(), nb::arg(), poll);
  m.def("greedy_blend", &greedy_blend<std::int16_t>, nb::arg(), nb::arg(), nb::arg(), nb::arg(), poll);
  m.def("greedy_blend", &greedy_blend<std::int32_t>, nb::arg(), nb::arg(), nb::arg(), nb::arg(), poll);
  m.def("exhaustive_blend", &exhaustive_blend<std::int16_t>, nb::arg(), nb::arg(), nb::arg(), nb::arg(), poll);
  m.def("exhaustive_blend", &exhaustive_blend<std::int32_t>, nb::arg(), nb::arg(), nb::arg(), nb::arg(), poll);
  const auto balanced = [&](auto kernel) {
    m.def("balanced_blend", kernel, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), poll);
  };
  balanced(&balanced_blend<std::uint16_t, std::uint32_t>);
  balanced(&balanced_blend<std::uint16_t, std::int64_t>);
  balanced(&balanced_blend<std::uint32_t, std::uint32_t>);
  balanced(&balanced_blend<std::uint32_t, std::int64_t>);
  m.def("sample_index", &sample_index<std::int32_t, std::int32_t>, nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), poll);
  m.def("sample_index", &sample_index<std::int32_t, std::int64_t>, nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), poll);
  m.def("sample_index", &sample_index<std::int64_t, std::int64_t>, nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), poll);
  m.def("pair_lengths", &pair_lengths, nb::arg(), nb::arg(), nb::arg(), poll);
  m.def("cut_pairs", &cut_pairs, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), poll);
  m.def("permute", &permute, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), poll);
  m.def("find_position", &find_position);
  m.def("permute_blocks", &permute_blocks, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), poll);
  m.attr("PERMUTATION_VERSION") = trackbed::kPermutationVersion;
  m.def("permutations_of", &permutations_of);
  m.def("instant_locate", &instant_locate, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), poll);
  m.def("plan_packs", &plan_packs);
  m.def("count_items", &count_items);
  m.def("sort_items", &sort_items);
  m.def("find_packs", &find_packs);
  m.def("find_visits", &find_visits);
  m.def("join_borders", &join_borders);
  m.def("leaf_costs", &leaf_costs);
  m.def("find_costs", &find_costs);
  m.def("deal_packs", &deal_packs);
  m.def("new_workers", &new_workers);
  m.def("gather", &gather, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), poll);
  m.def("gather_masked", &gather_masked, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), nb::arg(), poll);
  m.def("gather_packs", &gather_packs, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), poll);
  m.def("legacy_draws", &legacy_draws);
  m.def("draw_phases", &draw_phases, nb::call_guard<nb::gil_scoped_release>());
  m.def("interleaving_counts", &interleaving_counts, nb::call_guard<nb::gil_scoped_release>());
}
