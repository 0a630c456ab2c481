#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "python.hpp"
#include "shared_counters.hpp"

namespace nb = nanobind;

using trackbed::python::Array;
using trackbed::python::poll_of;
using trackbed::python::span_of;

namespace {

void set_counter(Array<std::uint32_t> words, std::size_t index, std::uint32_t count) {
  trackbed::comm::set_counter(span_of(words), index, count);
}

void wait_for_counters(Array<std::uint32_t> words, std::size_t first, std::size_t number, std::uint32_t count,
                       nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  const nb::gil_scoped_release no_gil;
  trackbed::comm::wait_for_counters(span_of(words), first, number, count, poll);
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("set_counter", &set_counter);
  m.def("wait_for_counters", &wait_for_counters, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("poll").none());
  m.attr("COUNTER_WORDS") = trackbed::comm::kCounterWords;
}
