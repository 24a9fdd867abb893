// Python surface of the host ring.
#pragma once

#include <nanobind/nanobind.h>

namespace nb = nanobind;

inline void bind_ring(nb::module_ &) {}
