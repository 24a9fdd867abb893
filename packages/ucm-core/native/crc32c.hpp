// CRC-32C (Castagnoli polynomial 0x1EDC6F41, reflected), the checksum of objects at rest.
//
// One crc32 instruction takes eight bytes but its result is ready only three cycles later, so the fast
// path runs three independent streams over neighbouring chunks and joins them: the CRC of "A then B" is
// the CRC of A advanced over |B| zero bytes, XOR the CRC of B from zero.  Advancing is linear over GF(2),
// hence a table lookup per byte of the CRC for a fixed |B|.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace ucm {

namespace crc_detail {

constexpr std::uint32_t kPolynomial = 0x82F63B78u;
constexpr std::size_t kChunk = 2048;  // bytes per stream and round
constexpr std::size_t kLine = 64;
// What no cache holds is asked for two rounds before its turn: a processor's own look-ahead does not follow streams
// that jump after half a page.
constexpr std::size_t kAhead = 2 * 3 * kChunk;

using Table = std::array<std::uint32_t, 256>;
// sliced[k][b]: the CRC register after byte b followed by k zero bytes.
using Sliced = std::array<Table, 8>;
// advance[k][b]: the register with byte b at position k, advanced over a fixed number of zero bytes.
using Advance = std::array<Table, 4>;

inline Sliced make_sliced() {
  Sliced sliced{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? kPolynomial : 0);
    sliced[0][byte] = value;
  }
  for (std::size_t k = 1; k < 8; ++k)
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = sliced[k - 1][byte];
      sliced[k][byte] = (before >> 8) ^ sliced[0][before & 0xFF];
    }
  return sliced;
}

inline const Sliced &sliced_tables() {
  static const Sliced tables = make_sliced();
  return tables;
}

inline Advance make_advance(std::size_t zero_bytes) {
  const Table &step = sliced_tables()[0];
  std::array<std::uint32_t, 32> basis{};
  for (std::size_t bit = 0; bit < 32; ++bit) {
    std::uint32_t value = 1u << bit;
    for (std::size_t i = 0; i < zero_bytes; ++i) value = (value >> 8) ^ step[value & 0xFF];
    basis[bit] = value;
  }
  Advance advance{};
  for (std::size_t k = 0; k < 4; ++k)
    for (std::size_t byte = 0; byte < 256; ++byte)
      for (std::size_t bit = 0; bit < 8; ++bit)
        if (byte >> bit & 1) advance[k][byte] ^= basis[8 * k + bit];
  return advance;
}

inline std::uint32_t apply(const Advance &advance, std::uint32_t crc) {
  return advance[0][crc & 0xFF] ^ advance[1][crc >> 8 & 0xFF] ^ advance[2][crc >> 16 & 0xFF] ^
         advance[3][crc >> 24];
}

inline std::uint64_t load64(const unsigned char *data) {
  std::uint64_t word;
  std::memcpy(&word, data, 8);
  return word;
}

// Slicing by eight: eight independent lookups per eight bytes.  Used where no crc32 instruction exists.
inline std::uint32_t portable(std::uint32_t crc, const unsigned char *data, std::size_t size) {
  const Sliced &t = sliced_tables();
  for (; size >= 8; data += 8, size -= 8) {
    const std::uint32_t low = crc ^ (data[0] | data[1] << 8 | data[2] << 16 |
                                     static_cast<std::uint32_t>(data[3]) << 24);
    crc = t[7][low & 0xFF] ^ t[6][low >> 8 & 0xFF] ^ t[5][low >> 16 & 0xFF] ^ t[4][low >> 24] ^
          t[3][data[4]] ^ t[2][data[5]] ^ t[1][data[6]] ^ t[0][data[7]];
  }
  for (; size > 0; ++data, --size) crc = (crc >> 8) ^ t[0][(crc ^ *data) & 0xFF];
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) inline std::uint32_t hardware(std::uint32_t crc,
                                                                const unsigned char *data,
                                                                std::size_t size) {
  static const Advance one = make_advance(kChunk);
  static const Advance two = make_advance(2 * kChunk);
  for (; size >= 3 * kChunk; data += 3 * kChunk, size -= 3 * kChunk) {
    std::uint64_t a = crc, b = 0, c = 0;
    for (std::size_t line = 0; line < kChunk; line += kLine) {
      const auto *const ahead = reinterpret_cast<const char *>(data) + kAhead + line;
      for (std::size_t stream = 0; stream < 3; ++stream) _mm_prefetch(ahead + stream * kChunk, _MM_HINT_T0);
      for (std::size_t i = line; i < line + kLine; i += 8) {
        a = _mm_crc32_u64(a, load64(data + i));
        b = _mm_crc32_u64(b, load64(data + kChunk + i));
        c = _mm_crc32_u64(c, load64(data + 2 * kChunk + i));
      }
    }
    crc = apply(two, static_cast<std::uint32_t>(a)) ^ apply(one, static_cast<std::uint32_t>(b)) ^
          static_cast<std::uint32_t>(c);
  }
  std::uint64_t wide = crc;
  for (; size >= 8; data += 8, size -= 8) wide = _mm_crc32_u64(wide, load64(data));
  crc = static_cast<std::uint32_t>(wide);
  for (; size > 0; ++data, --size) crc = _mm_crc32_u8(crc, *data);
  return crc;
}
#endif

}  // namespace crc_detail

inline bool crc32c_has_hardware() {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("sse4.2");
  return has;
#else
  return false;
#endif
}

// CRC-32C of `size` bytes; `seed` is the CRC of the bytes before them (0 = none).
inline std::uint32_t crc32c(const void *data, std::size_t size, std::uint32_t seed = 0,
                            bool use_hardware = true) {
  const auto *bytes = static_cast<const unsigned char *>(data);
#if defined(__x86_64__)
  if (use_hardware && crc32c_has_hardware()) return ~crc_detail::hardware(~seed, bytes, size);
#else
  (void)use_hardware;
#endif
  return ~crc_detail::portable(~seed, bytes, size);
}

}  // namespace ucm
