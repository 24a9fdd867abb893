// Strided copies between an engine's memory and canonical payloads.
//
// Canonical bytes of a part are token-major and dense: (token, head, dim).  The engine's side is described
// by four strides, so one routine serves vLLM's blocks (K transposed per head on CPU), SGLang's pages and
// TensorRT-LLM's pools.  The layout is looked at once per copy and the longest dense run is moved at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ucm {

// One part of one unit, as the engine keeps it.  Field order = column order of the Python array.
struct PartRow {
  std::int64_t base, page_stride, token_stride, head_stride, dim_stride;
  std::int64_t heads, dim, item_bytes, canonical_offset;
};

// `token_count` tokens of one payload that lie in one page.
struct PieceRow {
  std::int64_t payload_index, token_in_block, page_id, token_in_page, token_count;
};

static_assert(sizeof(PartRow) == 9 * sizeof(std::int64_t), "PartRow mirrors int64[P, 9]");
static_assert(sizeof(PieceRow) == 5 * sizeof(std::int64_t), "PieceRow mirrors int64[N, 5]");

enum class Direction { kGather, kScatter };  // engine to canonical, canonical to engine

template <Direction direction>
inline void move_bytes(char *engine, char *canonical, std::size_t size) {
  if constexpr (direction == Direction::kGather)
    std::memcpy(canonical, engine, size);
  else
    std::memcpy(engine, canonical, size);
}

// memcpy for runs of pages that nobody reads again soon: stores go past the caches, so no line is fetched only to
// be overwritten.  memcpy itself does so from megabytes on, and below uses one instruction that is four times
// slower where the two addresses lie a few bytes apart modulo 4096.  What is read is asked for two pages before its
// turn, while the run lasts: the rows of another page may be nobody's.  All bytes are down before the next store.
inline void stream(char *to, const char *from, std::size_t size) {
#if defined(__x86_64__)
  constexpr std::size_t kLine = 64, kVectors = 4, kAhead = 128 * kLine;
  const std::size_t head = std::min(size, (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, head);
  to += head, from += head, size -= head;
  for (; size >= kLine; to += kLine, from += kLine, size -= kLine) {
    _mm_prefetch(from + (size > kAhead ? kAhead : 0), _MM_HINT_NTA);
    const auto *in = reinterpret_cast<const __m128i *>(from);
    auto *out = reinterpret_cast<__m128i *>(to);
    __m128i vector[kVectors];
    for (std::size_t i = 0; i < kVectors; ++i) vector[i] = _mm_loadu_si128(in + i);
    for (std::size_t i = 0; i < kVectors; ++i) _mm_stream_si128(out + i, vector[i]);
  }
  _mm_sfence();
#endif
  std::memcpy(to, from, size);
}

// One dense run.
template <Direction direction>
inline void move_run(char *engine, char *canonical, std::size_t size) {
  constexpr std::size_t kStreamBytes = 4096;
  if (size < kStreamBytes) return move_bytes<direction>(engine, canonical, size);
  if constexpr (direction == Direction::kGather)
    stream(canonical, engine, size);
  else
    stream(engine, canonical, size);
}

#if defined(__x86_64__)
// Transposes 8 x 8 items of two bytes: row r, item c of `from` becomes row c, item r of `to`.
inline void transpose_8x8(const char *from, std::int64_t from_row, char *to, std::int64_t to_row) {
  __m128i a[8], b[8];
  for (int r = 0; r < 8; ++r) a[r] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + r * from_row));
  for (int r = 0; r < 4; ++r) {  // b[2r], b[2r+1]: rows 2r and 2r+1 interleaved, low and high half
    b[2 * r] = _mm_unpacklo_epi16(a[2 * r], a[2 * r + 1]);
    b[2 * r + 1] = _mm_unpackhi_epi16(a[2 * r], a[2 * r + 1]);
  }
  for (int half = 0; half < 2; ++half)  // rows 0-3 in a[0..3], rows 4-7 in a[4..7], two columns each
    for (int side = 0; side < 2; ++side) {
      const __m128i upper = b[4 * half + side], lower = b[4 * half + side + 2];
      a[4 * half + 2 * side] = _mm_unpacklo_epi32(upper, lower);
      a[4 * half + 2 * side + 1] = _mm_unpackhi_epi32(upper, lower);
    }
  for (int pair = 0; pair < 4; ++pair) {
    char *out = to + 2 * pair * to_row;
    _mm_storeu_si128(reinterpret_cast<__m128i *>(out), _mm_unpacklo_epi64(a[pair], a[pair + 4]));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(out + to_row), _mm_unpackhi_epi64(a[pair], a[pair + 4]));
  }
}
#endif

// The strides of one head's tokens and dims, held in registers: a byte written could change a PartRow.
struct Grid {
  std::int64_t token_stride, dim_stride, canonical_row;
};

template <Direction direction, std::size_t item>
inline void move_tile(const Grid grid, char *engine, char *canonical, std::int64_t tokens, std::int64_t dims) {
#if defined(__x86_64__)
  if (item == 2 && grid.token_stride == 2 && tokens == 8 && dims == 8) {
    if constexpr (direction == Direction::kGather)
      transpose_8x8(engine, grid.dim_stride, canonical, grid.canonical_row);
    else
      transpose_8x8(canonical, grid.canonical_row, engine, grid.dim_stride);
    return;
  }
#endif
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t d = 0; d < dims; ++d)
      move_bytes<direction>(engine + t * grid.token_stride + d * grid.dim_stride,
                            canonical + t * grid.canonical_row + d * static_cast<std::int64_t>(item), item);
}

// tokens x dims of one head.  Tiles keep both sides' cache lines in use when one side is the transpose of
// the other (its dim stride is a whole row of tokens).
template <Direction direction, std::size_t item>
void move_tiles(const PartRow &part, char *engine, char *canonical, std::int64_t tokens) {
  constexpr std::int64_t tile = 8;
  const std::int64_t dims = part.dim;
  const Grid grid{part.token_stride, part.dim_stride, part.heads * dims * static_cast<std::int64_t>(item)};
  for (std::int64_t t = 0; t < tokens; t += tile)
    for (std::int64_t d = 0; d < dims; d += tile)
      move_tile<direction, item>(grid, engine + t * grid.token_stride + d * grid.dim_stride,
                                 canonical + t * grid.canonical_row + d * static_cast<std::int64_t>(item),
                                 std::min(tile, tokens - t), std::min(tile, dims - d));
}

template <Direction direction>
void move_items(const PartRow &part, char *engine, char *canonical, std::int64_t tokens) {
  const std::int64_t canonical_row = part.heads * part.dim * part.item_bytes;
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t d = 0; d < part.dim; ++d)
      move_bytes<direction>(engine + t * part.token_stride + d * part.dim_stride,
                            canonical + t * canonical_row + d * part.item_bytes,
                            static_cast<std::size_t>(part.item_bytes));
}

template <Direction direction>
void move_head(const PartRow &part, char *engine, char *canonical, std::int64_t tokens) {
  switch (part.item_bytes) {
    case 1: return move_tiles<direction, 1>(part, engine, canonical, tokens);
    case 2: return move_tiles<direction, 2>(part, engine, canonical, tokens);
    case 4: return move_tiles<direction, 4>(part, engine, canonical, tokens);
    case 8: return move_tiles<direction, 8>(part, engine, canonical, tokens);
    default: return move_items<direction>(part, engine, canonical, tokens);
  }
}

// The longest run that is dense on the engine's side too.
enum class Run { kTokens, kToken, kHead, kItem };

inline Run longest_run(const PartRow &part, std::int64_t tokens) {
  const std::int64_t head_bytes = part.dim * part.item_bytes;
  if (part.dim != 1 && part.dim_stride != part.item_bytes) return Run::kItem;
  if (part.heads != 1 && part.head_stride != head_bytes) return Run::kHead;
  if (tokens != 1 && part.token_stride != part.heads * head_bytes) return Run::kToken;
  return Run::kTokens;
}

// One part of one piece.  `engine` and `canonical` point at its first token.
template <Direction direction>
void move_part(const PartRow &part, char *engine, char *canonical, std::int64_t tokens) {
  const std::int64_t head_bytes = part.dim * part.item_bytes;
  const std::int64_t token_bytes = part.heads * head_bytes;
  switch (longest_run(part, tokens)) {
    case Run::kTokens:
      return move_run<direction>(engine, canonical, static_cast<std::size_t>(tokens * token_bytes));
    case Run::kToken:
      for (std::int64_t t = 0; t < tokens; ++t)
        move_run<direction>(engine + t * part.token_stride, canonical + t * token_bytes,
                            static_cast<std::size_t>(token_bytes));
      return;
    case Run::kHead:
      for (std::int64_t t = 0; t < tokens; ++t)
        for (std::int64_t h = 0; h < part.heads; ++h)
          move_bytes<direction>(engine + t * part.token_stride + h * part.head_stride,
                                canonical + t * token_bytes + h * head_bytes,
                                static_cast<std::size_t>(head_bytes));
      return;
    case Run::kItem:
      for (std::int64_t h = 0; h < part.heads; ++h)
        move_head<direction>(part, engine + h * part.head_stride, canonical + h * head_bytes, tokens);
  }
}

// One layout of engine memory, and where payloads lie in it.
struct Layout {
  const PartRow *parts;
  std::size_t part_count;
  const PieceRow *pieces;
  std::size_t piece_count;
};

// Every part of every piece.  The caller has checked payload_index and the counts; addresses are its word.
template <Direction direction>
void copy_pieces(const PartRow *parts, std::size_t part_count, const PieceRow *pieces,
                 std::size_t piece_count, const std::int64_t *payloads) {
  for (std::size_t n = 0; n < piece_count; ++n) {
    const PieceRow &piece = pieces[n];
    char *payload = reinterpret_cast<char *>(payloads[piece.payload_index]);
    for (std::size_t p = 0; p < part_count; ++p) {
      const PartRow &part = parts[p];
      char *engine = reinterpret_cast<char *>(part.base + piece.page_id * part.page_stride +
                                              piece.token_in_page * part.token_stride);
      char *canonical = payload + part.canonical_offset +
                        piece.token_in_block * part.heads * part.dim * part.item_bytes;
      move_part<direction>(part, engine, canonical, piece.token_count);
    }
  }
}

// Zero the bytes between a shard's end and the next shard's begin, so that equal units give equal objects.
inline void zero_padding(const std::int64_t *payloads, std::size_t count, std::int64_t shards,
                         std::int64_t shard_bytes, std::int64_t stride) {
  const auto padding = static_cast<std::size_t>(stride - shard_bytes);
  if (padding == 0) return;
  for (std::size_t n = 0; n < count; ++n)
    for (std::int64_t shard = 0; shard < shards; ++shard)
      std::memset(reinterpret_cast<char *>(payloads[n]) + shard * stride + shard_bytes, 0, padding);
}

}  // namespace ucm
