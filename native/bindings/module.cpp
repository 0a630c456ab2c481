#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "trackbed/blend.hpp"
#include "trackbed/isa.hpp"
#include "trackbed/narrow.hpp"
#include "trackbed/sample_index.hpp"

namespace nb = nanobind;

namespace {

template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<T> span_of(const Array<T>& array) {
  return {array.data(), array.size()};
}

template <class Id>
void greedy_blend(Array<const double> weights, Array<Id> dataset_index, Array<std::int64_t> dataset_sample_index,
                  int level) {
  trackbed::greedy_blend<Id>(span_of(weights), span_of(dataset_index), span_of(dataset_sample_index),
                             static_cast<trackbed::Isa>(level));
}

template <class Id>
void exhaustive_blend(Array<const std::int64_t> sizes, Array<Id> dataset_index,
                      Array<std::int64_t> dataset_sample_index, int level) {
  trackbed::exhaustive_blend<Id>(span_of(sizes), span_of(dataset_index), span_of(dataset_sample_index),
                                 static_cast<trackbed::Isa>(level));
}

template <class Visit, class Row>
void sample_index(Array<const std::int32_t> lengths, Array<const Visit> visits, std::int64_t sequence_length,
                  std::int64_t extra_token, Array<Row> rows) {
  trackbed::sample_index<Visit, Row>(span_of(lengths), span_of(visits), sequence_length, extra_token, span_of(rows));
}

using AnyVector = nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AnyConstVector = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Calls `use` with a value of the integer type that `dtype` says, of those listed.
template <class... Types, class Use>
void with_integer(nb::dlpack::dtype dtype, Use use) {
  const bool known = ((dtype == nb::dtype<Types>() && (use(Types{}), true)) || ...);
  if (!known) {
    throw nb::type_error("narrow: both vectors must hold integers of a known type");
  }
}

std::size_t narrow(AnyConstVector source, AnyVector target) {
  if (source.size() != target.size()) {
    throw nb::value_error("narrow: both vectors must be equally long");
  }
  std::size_t first = 0;
  with_integer<std::int64_t, std::int32_t, std::uint16_t, std::uint32_t, std::uint8_t, std::int16_t, std::int8_t,
               std::uint64_t>(source.dtype(), [&](auto from) {
    with_integer<std::uint16_t, std::int32_t, std::int64_t, std::uint8_t, std::int16_t, std::int8_t>(
        target.dtype(), [&](auto to) {
          using From = decltype(from);
          using To = decltype(to);
          first = trackbed::narrow<From, To>({static_cast<const From*>(source.data()), source.size()},
                                             {static_cast<To*>(target.data()), target.size()});
        });
  });
  return first;
}

}  // namespace

NB_MODULE(_native, m) {
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  m.def("best_isa", [] { return static_cast<int>(trackbed::best_isa()); });
  m.def("narrow", &narrow);
  m.def("greedy_blend", &greedy_blend<std::int16_t>, no_gil);
  m.def("greedy_blend", &greedy_blend<std::int32_t>, no_gil);
  m.def("exhaustive_blend", &exhaustive_blend<std::int16_t>, no_gil);
  m.def("exhaustive_blend", &exhaustive_blend<std::int32_t>, no_gil);
  m.def("sample_index", &sample_index<std::int32_t, std::int32_t>, no_gil);
  m.def("sample_index", &sample_index<std::int32_t, std::int64_t>, no_gil);
  m.def("sample_index", &sample_index<std::int64_t, std::int64_t>, no_gil);
}
