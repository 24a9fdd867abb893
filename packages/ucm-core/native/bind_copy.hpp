// Python surface of the strided copies: argument checks and the GIL, nothing else.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arguments.hpp"
#include "copy.hpp"

namespace copy_binding {

namespace nb = nanobind;
using namespace nb::literals;

using Rows = nb::ndarray<const std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Addresses = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Strides = std::vector<std::tuple<Rows, Rows>>;  // parts and pieces of each layout

using arguments::number;
using arguments::require;

inline void check_parts(const Rows &parts) {
  require(parts.shape(1) == 9, "parts has " + number(parts.shape(1)) + " columns, not 9");
  const auto *rows = reinterpret_cast<const ucm::PartRow *>(parts.data());
  for (std::size_t p = 0; p < parts.shape(0); ++p) {
    const ucm::PartRow &row = rows[p];
    require(row.heads > 0 && row.dim > 0 && row.item_bytes > 0 && row.canonical_offset >= 0,
            "part " + number(p) + ": heads " + number(row.heads) + ", dim " + number(row.dim) + ", item_bytes " +
                number(row.item_bytes) + " must be positive and canonical_offset " +
                number(row.canonical_offset) + " not negative");
  }
}

// Largest token end over all pieces, for the check against the payload's size.
inline std::int64_t check_pieces(const Rows &pieces, std::size_t payload_count) {
  require(pieces.shape(1) == 5, "pieces has " + number(pieces.shape(1)) + " columns, not 5");
  const auto *rows = reinterpret_cast<const ucm::PieceRow *>(pieces.data());
  std::int64_t end = 0;
  for (std::size_t n = 0; n < pieces.shape(0); ++n) {
    const ucm::PieceRow &row = rows[n];
    require(row.payload_index >= 0 && row.payload_index < static_cast<std::int64_t>(payload_count),
            "piece " + number(n) + ": payload_index " + number(row.payload_index) + " is not in [0, " +
                number(payload_count) + ")");
    require(row.token_in_block >= 0 && row.page_id >= 0 && row.token_in_page >= 0 && row.token_count >= 0,
            "piece " + number(n) + ": token_in_block " + number(row.token_in_block) + ", page_id " +
                number(row.page_id) + ", token_in_page " + number(row.token_in_page) + ", token_count " +
                number(row.token_count) + ": none may be negative");
    end = std::max(end, row.token_in_block + row.token_count);
  }
  return end;
}

inline void check_fits(const Rows &parts, std::int64_t token_end, std::int64_t payload_bytes) {
  const auto *rows = reinterpret_cast<const ucm::PartRow *>(parts.data());
  for (std::size_t p = 0; p < parts.shape(0); ++p) {
    const ucm::PartRow &row = rows[p];
    const std::int64_t end = row.canonical_offset + token_end * row.heads * row.dim * row.item_bytes;
    require(end <= payload_bytes, "part " + number(p) + " ends at byte " + number(end) + " of a payload of " +
                                      number(payload_bytes) + " bytes");
  }
}

template <ucm::Direction direction>
void copy(Rows parts, Rows pieces, Addresses payloads, std::int64_t payload_bytes) {
  check_parts(parts);
  const std::int64_t token_end = check_pieces(pieces, payloads.shape(0));
  if (payload_bytes > 0) check_fits(parts, token_end, payload_bytes);
  const auto *part_rows = reinterpret_cast<const ucm::PartRow *>(parts.data());
  const auto *piece_rows = reinterpret_cast<const ucm::PieceRow *>(pieces.data());
  nb::gil_scoped_release released;
  ucm::copy_pieces<direction>(part_rows, parts.shape(0), piece_rows, pieces.shape(0), payloads.data());
}

inline void zero_padding(Addresses payloads, std::int64_t shards, std::int64_t shard_bytes, std::int64_t stride) {
  require(shards >= 0 && shard_bytes >= 0 && shard_bytes <= stride,
          "shard_bytes " + number(shard_bytes) + " is not in [0, " + number(stride) + "], or shards " +
              number(shards) + " is negative");
  nb::gil_scoped_release released;
  ucm::zero_padding(payloads.data(), payloads.shape(0), shards, shard_bytes, stride);
}

// The rows of each layout, checked: what pieces are of is one of `payload_count`, and fits `payload_bytes`.
inline std::vector<ucm::Layout> parse(const Strides &strides, std::size_t payload_count, std::int64_t payload_bytes) {
  std::vector<ucm::Layout> layouts;
  for (const auto &[parts, pieces] : strides) {
    check_parts(parts);
    check_fits(parts, check_pieces(pieces, payload_count), payload_bytes);
    layouts.push_back({reinterpret_cast<const ucm::PartRow *>(parts.data()), parts.shape(0),
                       reinterpret_cast<const ucm::PieceRow *>(pieces.data()), pieces.shape(0)});
  }
  return layouts;
}

inline void bind(nb::module_ &m) {
  m.def("gather", &copy<ucm::Direction::kGather>, "parts"_a.noconvert(), "pieces"_a.noconvert(),
        "payloads"_a.noconvert(), nb::kw_only(), "payload_bytes"_a = 0);
  m.def("scatter", &copy<ucm::Direction::kScatter>, "parts"_a.noconvert(), "pieces"_a.noconvert(),
        "payloads"_a.noconvert(), nb::kw_only(), "payload_bytes"_a = 0);
  m.def("zero_padding", &zero_padding, "payloads"_a.noconvert(), "shards"_a, "shard_bytes"_a, "stride"_a);
}

}  // namespace copy_binding
