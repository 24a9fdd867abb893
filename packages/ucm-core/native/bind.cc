// The Python surface of the native core: argument checks and the GIL, nothing else.
#include <nanobind/nanobind.h>

#include "bind_copy.hpp"
#include "bind_files.hpp"
#include "bind_ring.hpp"
#include "crc32c.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

std::uint32_t crc32c(nb::handle buffer, std::uint32_t seed, bool hardware) {
  Py_buffer view;
  if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  std::uint32_t value;
  {
    nb::gil_scoped_release released;
    value = ucm::crc32c(view.buf, static_cast<std::size_t>(view.len), seed, hardware);
  }
  PyBuffer_Release(&view);
  return value;
}

}  // namespace

NB_MODULE(_native, m) {
  // A ring may live as long as its process: the kernel lets go of it, and an engine's log stays clean.
  nb::set_leak_warnings(false);
  m.def("crc32c", &crc32c, "buffer"_a, "seed"_a = 0, nb::kw_only(), "hardware"_a = true);
  copy_binding::bind(m);
  files_binding::bind(m);
  bind_ring(m);
}
