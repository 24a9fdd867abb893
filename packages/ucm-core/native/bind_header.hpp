// What a region says of itself before anybody joins it.
#pragma once

#include <cstring>
#include <optional>
#include <tuple>

#include <nanobind/nanobind.h>
#include <unistd.h>

#include "ring_memory.hpp"

namespace ring_binding {

namespace nb = nanobind;

using HeaderFields = std::tuple<uint32_t, uint32_t, uint64_t, nb::bytes, uint32_t, uint32_t, uint32_t>;

inline std::optional<HeaderFields> ring_header(int fd) {
  ucm::Header header;
  size_t size = 0;
  while (size < sizeof header) {
    const ssize_t more = pread(fd, reinterpret_cast<char *>(&header) + size, sizeof header - size,
                               static_cast<off_t>(size));
    if (more <= 0) return {};
    size += static_cast<size_t>(more);
  }
  if (std::memcmp(header.magic, ucm::kRingMagic, 8) != 0) return {};
  return HeaderFields{header.version, header.slots, header.payload_bytes, nb::bytes(header.geometry_digest, 32),
                      static_cast<uint32_t>(header.rules.policy), header.rules.ttl_s, header.shards};
}

}  // namespace ring_binding
