// Conversions between Python objects and the types of kernels, shared by both extensions.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "trackbed/poll.hpp"

namespace trackbed::python {

namespace nb = nanobind;

template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<T> span_of(const Array<T>& array) {
  return {array.data(), array.size()};
}

// Poll that checks for signals, so that Ctrl-C works, and calls `callback`, unless it is None, with the number of items
// that are done. The GIL may be released; the callback must outlive the poll.
inline Poll poll_of(nb::handle callback) {
  return Poll([callback](std::int64_t done) {
    const nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) {
      throw nb::python_error();
    }
    if (!callback.is_none()) {
      callback(done);
    }
  });
}

// Bytes of a list of objects, valid as long as this object.
class Buffers {
 public:
  explicit Buffers(nb::list objects) {
    views_.reserve(objects.size());
    for (const nb::handle object : objects) {
      Py_buffer view;
      if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) {
        release();
        throw nb::python_error();
      }
      views_.push_back(view);
      spans_.push_back({static_cast<const std::byte*>(view.buf), static_cast<std::size_t>(view.len)});
    }
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  ~Buffers() { release(); }

  std::span<const std::span<const std::byte>> spans() const { return spans_; }

 private:
  void release() {
    for (Py_buffer& view : views_) {
      PyBuffer_Release(&view);
    }
  }

  std::vector<Py_buffer> views_;
  std::vector<std::span<const std::byte>> spans_;
};

inline std::span<const char> text_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// Vectors of plain structures are passed as vectors of their 64-bit words.
template <class Structure, class Word>
std::span<Structure> structures_of(const Array<Word>& words) {
  static_assert(sizeof(Structure) % sizeof(Word) == 0 && alignof(Structure) <= alignof(Word));
  return {reinterpret_cast<Structure*>(words.data()), words.size() * sizeof(Word) / sizeof(Structure)};
}

}  // namespace trackbed::python
