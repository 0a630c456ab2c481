#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>

#include "../files/commit.hpp"
#include "../files/exchange.hpp"
#include "../files/index_ends.hpp"
#include "../files/read.hpp"
#include "python.hpp"

namespace nb = nanobind;
namespace files = trackbed::files;

using trackbed::python::Array;
using trackbed::python::Buffers;
using trackbed::python::poll_of;
using trackbed::python::span_of;
using trackbed::python::structures_of;
using trackbed::python::text_of;

namespace {

void read_stamps(nb::bytes paths, Array<std::int64_t> stamps, int num_threads, nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  const files::Names names = text_of(paths);
  const auto found = structures_of<files::FileStamp>(stamps);
  if (static_cast<std::size_t>(std::count(names.begin(), names.end(), '\0')) < found.size()) {
    throw nb::value_error("each name must end with a zero byte");
  }
  const nb::gil_scoped_release no_gil;
  files::read_stamps(names, found, num_threads, poll);
}

void read_parts(nb::bytes paths, Array<const std::int64_t> starts, Array<const std::int64_t> sizes,
                Array<std::uint8_t> content, Array<std::int64_t> stamps, nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  const files::Names names = text_of(paths);
  const auto found = structures_of<files::FileStamp>(stamps);
  const nb::gil_scoped_release no_gil;
  files::read_parts(names, span_of(starts), span_of(sizes), std::as_writable_bytes(span_of(content)), found, poll);
}

void read_index_ends(nb::bytes paths, Array<std::uint8_t> content, Array<std::int64_t> ends, int num_threads,
                     nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  const files::Names names = text_of(paths);
  const auto found = structures_of<files::IndexEnds>(ends);
  const nb::gil_scoped_release no_gil;
  files::read_index_ends(names, std::as_writable_bytes(span_of(content)), found, num_threads, poll);
}

void commit_file_sets(nb::bytes paths, nb::bytes partials, Array<const std::int64_t> num_parts, nb::list parts,
                      Array<const std::int64_t> num_files, Array<const std::uint8_t> claims, bool may_be_unnamed,
                      Array<std::int64_t> stamps, Array<std::int32_t> errors, nb::handle callback) {
  trackbed::Poll poll = poll_of(callback);
  const Buffers buffers(parts);
  const files::FileSets sets{.paths = text_of(paths),
                             .partials = text_of(partials),
                             .num_parts = span_of(num_parts),
                             .parts = buffers.spans(),
                             .num_files = span_of(num_files),
                             .claims = span_of(claims),
                             .may_be_unnamed = may_be_unnamed};
  const auto found = structures_of<files::FileStamp>(stamps);
  const nb::gil_scoped_release no_gil;
  files::commit_file_sets(sets, found, span_of(errors), poll);
}

int exchange_names(nb::bytes path, nb::bytes other) {
  const nb::gil_scoped_release no_gil;
  return files::exchange_names(path.c_str(), other.c_str());
}

}  // namespace

NB_MODULE(_native, m) {
  const auto poll = nb::arg("poll").none();
  m.def("read_stamps", &read_stamps, nb::arg(), nb::arg(), nb::arg(), poll);
  m.def("read_parts", &read_parts, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), poll);
  m.def("read_index_ends", &read_index_ends, nb::arg(), nb::arg(), nb::arg(), nb::arg(), poll);
  m.def("commit_file_sets", &commit_file_sets, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), nb::arg(), poll);
  m.def("exchange_names", &exchange_names);
  m.attr("INDEX_ENDS_BYTES") = files::kIndexEndsBytes;
  m.attr("INDEX_ENDS_WORDS") = sizeof(files::IndexEnds) / sizeof(std::int64_t);
}
