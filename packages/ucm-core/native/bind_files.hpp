// Python surface of the objects at rest: argument checks and the GIL, nothing else.
#pragma once

#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include "arguments.hpp"
#include "files.hpp"

namespace files_binding {

namespace nb = nanobind;
using namespace nb::literals;

using Addresses = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Keys = nb::ndarray<const std::uint8_t, nb::shape<-1, 32>, nb::c_contig, nb::device::cpu>;
using Names = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Geometry = std::tuple<nb::bytes, std::int64_t, std::int64_t>;  // digest, shards, stride
template <class Value, std::size_t dimensions>
using Result = nb::ndarray<nb::numpy, Value, nb::ndim<dimensions>>;

using arguments::number;
using arguments::require;

inline std::string text(const nb::bytes &value) { return std::string(value.c_str(), value.size()); }

// Calls `fill` with memory for the result, without the GIL.
template <class Value, std::size_t dimensions, class Fill>
Result<Value, dimensions> filled(const std::size_t (&shape)[dimensions], Fill fill) {
  std::size_t size = 1;
  for (const std::size_t each : shape) size *= each;
  auto *data = new Value[size];
  nb::capsule owner(data, [](void *memory) noexcept { delete[] static_cast<Value *>(memory); });
  {
    nb::gil_scoped_release released;
    fill(data);
  }
  return Result<Value, dimensions>(data, dimensions, shape, owner);
}

inline std::string parse_plain(const nb::bytes &name, const char *what) {
  std::string parsed = text(name);
  require(ucm::plain_name(parsed), std::string(what) + " is not a plain file name");
  return parsed;
}

inline ucm::ObjectFormat parse_format(const nb::bytes &row_digest, const Geometry &geometry) {
  const auto &[digest, shards, stride] = geometry;
  require(row_digest.size() == 32 && digest.size() == 32,
          "digests have " + number(row_digest.size()) + " and " + number(digest.size()) + " bytes, not 32");
  require(shards > 0 && shards <= ucm::kMaxShards,
          "shards " + number(shards) + " is not in [1, " + number(ucm::kMaxShards) + "]");
  require(stride > 0 && stride % static_cast<std::int64_t>(ucm::kPage) == 0,
          "stride " + number(stride) + " is not a positive multiple of " + number(ucm::kPage));
  ucm::ObjectFormat format{};
  std::memcpy(format.row, row_digest.c_str(), 32);
  std::memcpy(format.geometry, digest.c_str(), 32);
  format.shards = static_cast<std::uint32_t>(shards);
  format.stride = static_cast<std::uint64_t>(stride);
  return format;
}

inline void construct(ucm::ObjectFiles *self, const nb::bytes &directory, const nb::bytes &segment,
                      const nb::bytes &row_digest, const Geometry &geometry, bool uring) {
  std::string name = parse_plain(segment, "segment");
  require(name.size() <= ucm::kMaxSegmentBytes, "segment has " + number(name.size()) + " bytes, more than " +
                                                    number(ucm::kMaxSegmentBytes));
  new (self) ucm::ObjectFiles(text(directory), std::move(name), parse_format(row_digest, geometry), uring);
}

inline ucm::ObjectBatch parse_batch(const Keys &keys, const Addresses &payloads) {
  require(keys.shape(0) == payloads.shape(0), number(keys.shape(0)) + " keys and " +
                                                  number(payloads.shape(0)) + " payloads are not one batch");
  return {keys.shape(0), keys.data(), payloads.data()};
}

inline ucm::ShardRange parse_range(const std::optional<std::pair<std::int64_t, std::int64_t>> &range,
                                   std::uint32_t shards) {
  const auto [begin, end] = range.value_or(std::pair<std::int64_t, std::int64_t>(0, shards));
  require(0 <= begin && begin < end && end <= shards, "shards [" + number(begin) + ", " + number(end) +
                                                          ") are no range of " + number(shards));
  return {static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(end)};
}

inline Result<std::int32_t, 2> read(const ucm::ObjectFiles &files, Keys keys, Addresses payloads, bool direct,
                                    std::int64_t not_before_ns,
                                    const std::optional<std::pair<std::int64_t, std::int64_t>> &shards) {
  const ucm::ObjectBatch batch = parse_batch(keys, payloads);
  const ucm::ShardRange range = parse_range(shards, files.format().shards);
  return filled<std::int32_t>({batch.count, range.count()}, [&](std::int32_t *results) {
    files.read(batch, range, direct, not_before_ns, results);
  });
}

inline Result<std::int32_t, 1> write(const ucm::ObjectFiles &files, Keys keys, Addresses payloads,
                                     const nb::list &temporary_names, bool direct, bool sync) {
  const ucm::ObjectBatch batch = parse_batch(keys, payloads);
  require(temporary_names.size() == batch.count,
          number(batch.count) + " keys and " + number(temporary_names.size()) + " temporary names");
  std::vector<std::string> temporaries;
  for (nb::handle name : temporary_names)
    temporaries.push_back(parse_plain(nb::cast<nb::bytes>(name), "temporary name"));
  return filled<std::int32_t>({batch.count}, [&](std::int32_t *results) {
    files.write(batch, temporaries, direct, sync, results);
  });
}

inline ucm::NameRows parse_names(const Names &names) {
  require(names.shape(1) >= ucm::kNamedKeyBytes, "names have " + number(names.shape(1)) + " bytes, fewer than " +
                                                     number(ucm::kNamedKeyBytes));
  return {names.shape(0), names.shape(1), names.data()};
}

inline Result<std::uint8_t, 1> stat(const ucm::ObjectFiles &files, Names names, std::int64_t not_before_ns) {
  const ucm::NameRows rows = parse_names(names);
  return filled<std::uint8_t>({rows.count},
                              [&](std::uint8_t *present) { files.stat(rows, not_before_ns, present); });
}

inline Result<std::uint8_t, 1> touch(const ucm::ObjectFiles &files, Names names) {
  const ucm::NameRows rows = parse_names(names);
  return filled<std::uint8_t>({rows.count}, [&](std::uint8_t *touched) { files.touch(rows, touched); });
}

inline bool probe_direct(const nb::bytes &directory, const nb::bytes &temporary_name) {
  const std::string temporary = parse_plain(temporary_name, "temporary name");
  nb::gil_scoped_release released;
  return ucm::probe_direct(directory.c_str(), temporary);
}

inline bool probe_uring() { return ucm::Uring::of_this_thread() != nullptr; }

inline void bind(nb::module_ &m) {
  nb::class_<ucm::ObjectFiles>(m, "ObjectFiles")
      .def("__init__", &construct, "directory"_a, "segment"_a, "row_digest"_a, "geometry"_a, nb::kw_only(),
           "uring"_a = false)
      .def("read", &read, "keys"_a.noconvert(), "payloads"_a.noconvert(), nb::kw_only(), "direct"_a,
           "not_before_ns"_a = 0, "shards"_a = nb::none())
      .def("write", &write, "keys"_a.noconvert(), "payloads"_a.noconvert(), "temporary_names"_a, nb::kw_only(),
           "direct"_a, "sync"_a = false)
      .def("stat", &stat, "names"_a.noconvert(), nb::kw_only(), "not_before_ns"_a = 0)
      .def("touch", &touch, "names"_a.noconvert());
  m.def("probe_direct", &probe_direct, "directory"_a, "temporary_name"_a = nb::bytes(".probe.tmp", 10));
  m.def("probe_uring", &probe_uring);
}

}  // namespace files_binding
