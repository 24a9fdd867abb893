// What an object looks like at rest: its name, its header page, and what may be believed of a page found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "crc32c.hpp"

namespace ucm {

constexpr std::size_t kPage = 4096;
constexpr std::uint32_t kMaxShards = 896;  // what one header page can hold checksums for
constexpr std::uint32_t kFormatVersion = 1;
constexpr std::size_t kNamedKeyBytes = 16;  // the part of a key that is in the file's name
constexpr std::size_t kFanOutDigits = 3;    // leading hex digits of the name that choose the folder
constexpr std::size_t kFolders = 1 << 4 * kFanOutDigits;
constexpr std::size_t kMaxSegmentBytes = 64;

// Results of one shard; failures of the system are the negated errno. kForeign: an intact object of another
// format version, byte order or geometry: not ours to read, and not ours to remove.
constexpr std::int32_t kOk = 0, kMiss = 1, kCorrupt = 2, kForeign = 3;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the header is stored as it lies in memory");

struct HeaderPage {
  char magic[8];
  std::uint32_t version;
  std::uint32_t shards;
  std::uint64_t stride;
  unsigned char geometry[32];
  unsigned char key[32];
  unsigned char row[32];  // digest of row seed and segment: the same key in another row is another object
  std::uint32_t shard_crc[kMaxShards];
  unsigned char zero[388];
  std::uint32_t crc;  // of all bytes of the page before it
};
static_assert(sizeof(HeaderPage) == kPage, "the header is one page");

// Of every version: the first six bytes of the magic, and the page's checksum in its last four bytes.
constexpr char kMagic[8] = {'U', 'C', 'M', 'O', 'B', 'J', '0', '1'};
constexpr std::size_t kMagicOfAllVersions = 6;

// What all objects of one row and segment have in common.
struct ObjectFormat {
  unsigned char geometry[32];
  unsigned char row[32];
  std::uint32_t shards;
  std::uint64_t stride;

  std::size_t payload_bytes() const { return shards * stride; }
  std::size_t object_bytes() const { return kPage + payload_bytes(); }
};

// A plain component of a path: with such names nothing can leave its folder.
inline bool plain_name(const std::string &component) {
  return !component.empty() && component != "." && component != ".." &&
         component.find('/') == std::string::npos && component.find('\0') == std::string::npos;
}

// "<3 hex>/<32 hex>.<segment>" of a key, below the row's directory.
class ObjectName {
 public:
  // `segment` is a plain name of at most kMaxSegmentBytes.
  ObjectName(const unsigned char *key, const std::string &segment) {
    char *const digits = path_ + kFanOutDigits + 1;
    for (std::size_t i = 0; i < kNamedKeyBytes; ++i) {
      digits[2 * i] = kHex[key[i] >> 4];
      digits[2 * i + 1] = kHex[key[i] & 15];
    }
    std::memcpy(path_, digits, kFanOutDigits);
    std::memcpy(folder_, digits, kFanOutDigits);
    path_[kFanOutDigits] = '/';
    folder_[kFanOutDigits] = '\0';
    digits[2 * kNamedKeyBytes] = '.';
    std::memcpy(digits + 2 * kNamedKeyBytes + 1, segment.c_str(), segment.size() + 1);
    number_ = static_cast<std::size_t>(key[0]) << 4 | key[1] >> 4;
  }
  const char *path() const { return path_; }
  const char *file() const { return path_ + kFanOutDigits + 1; }
  const char *folder() const { return folder_; }
  // Of the folder, below kFolders.
  std::size_t folder_number() const { return number_; }

 private:
  static constexpr const char *kHex = "0123456789abcdef";
  char path_[kFanOutDigits + 1 + 2 * kNamedKeyBytes + 1 + kMaxSegmentBytes + 1];
  char folder_[kFanOutDigits + 1];
  std::size_t number_;
};

inline std::uint32_t header_crc(const HeaderPage &header) {
  return crc32c(&header, offsetof(HeaderPage, crc));
}

inline const char *shard_at(const ObjectFormat &format, const void *payload, std::uint32_t shard) {
  return static_cast<const char *>(payload) + shard * format.stride;
}

inline void fill_header(HeaderPage &header, const ObjectFormat &format, const unsigned char *key,
                        const void *payload) {
  std::memset(&header, 0, sizeof header);
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kFormatVersion;
  header.shards = format.shards;
  header.stride = format.stride;
  std::memcpy(header.geometry, format.geometry, 32);
  std::memcpy(header.key, key, 32);
  std::memcpy(header.row, format.row, 32);
  for (std::uint32_t shard = 0; shard < format.shards; ++shard)
    header.shard_crc[shard] = crc32c(shard_at(format, payload, shard), format.stride);
  header.crc = header_crc(header);
}

inline bool same_shape(const HeaderPage &header, const ObjectFormat &format) {
  return header.shards == format.shards && header.stride == format.stride &&
         std::memcmp(header.geometry, format.geometry, 32) == 0;
}

// kOk: this object's header, whose checksums count. Only of an intact page is anything believed.
inline std::int32_t check_header(const HeaderPage &header, const ObjectFormat &format,
                                 const unsigned char *key) {
  const std::uint32_t crc = header_crc(header);
  const bool as_we_store = header.crc == crc;
  if (std::memcmp(header.magic, kMagic, kMagicOfAllVersions) != 0 ||
      (!as_we_store && __builtin_bswap32(header.crc) != crc))
    return kCorrupt;
  if (!as_we_store || std::memcmp(header.magic, kMagic, sizeof kMagic) != 0 ||
      header.version != kFormatVersion)
    return kForeign;
  if (std::memcmp(header.row, format.row, 32) != 0 ||
      std::memcmp(header.key, key, kNamedKeyBytes) != 0)
    return kCorrupt;  // a whole object, but not the one that bears this name
  if (!same_shape(header, format)) return kForeign;
  // The rightful holder of this name has another key: a collision of the truncated key, and no damage.
  return std::memcmp(header.key, key, 32) == 0 ? kOk : kMiss;
}

// Shards [begin, end) of an object.
struct ShardRange {
  std::uint32_t begin, end;

  std::uint32_t count() const { return end - begin; }
};

// One code per shard of the range. It is delivered whole or not at all: where a shard is damaged, the others,
// which nobody gets, are a miss.
inline void check_shards(const HeaderPage &header, const ObjectFormat &format, const void *payload,
                         ShardRange range, std::int32_t *results) {
  bool whole = true;
  for (std::uint32_t shard = range.begin; shard < range.end; ++shard) {
    const bool intact = header.shard_crc[shard] == crc32c(shard_at(format, payload, shard), format.stride);
    results[shard - range.begin] = intact ? kMiss : kCorrupt;
    whole &= intact;
  }
  if (whole) std::memset(results, 0, range.count() * sizeof *results);
}

// One code per shard for a file that is too short: what it has of whole shards is a miss, the rest damage.
inline void mark_short(const ObjectFormat &format, std::size_t file_bytes, ShardRange range,
                       std::int32_t *results) {
  for (std::uint32_t shard = range.begin; shard < range.end; ++shard)
    results[shard - range.begin] = file_bytes >= kPage + (shard + 1) * format.stride ? kMiss : kCorrupt;
}

}  // namespace ucm
