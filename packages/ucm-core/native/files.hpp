// Objects at rest: one file per block and segment, a header page and then the shards.
//
// A file becomes visible by rename after all its bytes are down, so a name that exists is a whole object
// or a damaged one; reading proves which.  Nothing here throws or deletes a published object: every
// outcome is a code, and dropping is the caller's decision.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "crc32c.hpp"
#include "steps.hpp"

namespace ucm {

constexpr std::size_t kPage = 4096;
constexpr std::uint32_t kMaxShards = 896;  // what one header page can hold checksums for
constexpr std::uint32_t kFormatVersion = 1;
constexpr std::size_t kNamedKeyBytes = 16;  // the part of a key that is in the file's name

// Results of one object; failures of the system are the negated errno.
constexpr std::int32_t kOk = 0, kMiss = 1, kCorrupt = 2;

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

constexpr char kMagic[8] = {'U', 'C', 'M', 'O', 'B', 'J', '0', '1'};

// What every object of one batch has in common.
struct ObjectFormat {
  unsigned char geometry[32];
  unsigned char row[32];
  std::uint32_t shards;
  std::uint64_t stride;

  std::size_t payload_bytes() const { return shards * stride; }
  std::size_t object_bytes() const { return kPage + payload_bytes(); }
};

// "<folder>/<file>" below the row's directory.  Two plain components and nothing else, so that a name can
// never leave the directory.
struct ObjectName {
  std::string path, folder, file;

  static bool plain(const std::string &component) {
    return !component.empty() && component != "." && component != ".." &&
           component.find('/') == std::string::npos && component.find('\0') == std::string::npos;
  }

  static bool parse(const std::string &text, ObjectName &name) {
    const std::size_t slash = text.find('/');
    if (slash == std::string::npos) return false;
    name = {text, text.substr(0, slash), text.substr(slash + 1)};
    return plain(name.folder) && plain(name.file);
  }
};

class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  ~Descriptor() { close(); }
  Descriptor(Descriptor &&other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor &operator=(Descriptor &&other) noexcept {
    if (this != &other) {
      close();
      number_ = std::exchange(other.number_, -1);
    }
    return *this;
  }
  bool valid() const { return number_ >= 0; }
  int number() const { return number_; }
  // 0 or -errno: a network file system may report a failed write only here.
  std::int32_t close() {
    const int number = std::exchange(number_, -1);
    return number >= 0 && ::close(number) != 0 && errno != EINTR ? -errno : 0;
  }

 private:
  int number_;
};

inline Descriptor open_directory(const char *path) {
  return Descriptor(::open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

// A folder of objects, for calls relative to it.  A link in its place is not followed: it could lead anywhere.
inline Descriptor open_folder(int directory, const ObjectName &name) {
  return Descriptor(
      ::openat(directory, name.folder.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

struct PageDeleter {
  void operator()(void *page) const { std::free(page); }
};
using HeaderMemory = std::unique_ptr<HeaderPage, PageDeleter>;

inline HeaderMemory make_header_memory() {
  return HeaderMemory(static_cast<HeaderPage *>(std::aligned_alloc(kPage, sizeof(HeaderPage))));
}

inline bool page_aligned(const void *address) {
  return reinterpret_cast<std::uintptr_t>(address) % kPage == 0;
}

// Direct transfers may be refused at the first transfer although open took the flag.  True when the
// descriptor is now buffered and the transfer can be tried again.
inline bool leave_direct(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && (flags & O_DIRECT) && ::fcntl(fd, F_SETFL, flags & ~O_DIRECT) == 0;
}

// Moves header and payload in one vectored call, going on after short transfers.  Returns 0, -errno, or
// -ENODATA at an early end of file.
template <ssize_t (*Call)(int, const iovec *, int, off_t)>
std::int32_t transfer(int fd, HeaderPage *header, void *payload, std::size_t payload_bytes) {
  iovec parts[2] = {{header, kPage}, {payload, payload_bytes}};
  std::size_t first = 0;
  off_t offset = 0;
  while (first < 2) {
    const ssize_t moved = Call(fd, parts + first, static_cast<int>(2 - first), offset);
    if (moved < 0 && (errno == EINTR || (errno == EINVAL && leave_direct(fd)))) continue;
    if (moved < 0) return -errno;
    if (moved == 0) return -ENODATA;
    offset += moved;
    auto rest = static_cast<std::size_t>(moved);
    for (; first < 2 && rest >= parts[first].iov_len; ++first) rest -= parts[first].iov_len;
    if (first == 2) break;
    parts[first].iov_base = static_cast<char *>(parts[first].iov_base) + rest;
    parts[first].iov_len -= rest;
  }
  return 0;
}

inline std::uint32_t header_crc(const HeaderPage &header) {
  return crc32c(&header, offsetof(HeaderPage, crc));
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
    header.shard_crc[shard] =
        crc32c(static_cast<const char *>(payload) + shard * format.stride, format.stride);
  header.crc = header_crc(header);
}

inline std::int32_t check_object(const HeaderPage &header, const ObjectFormat &format,
                                 const unsigned char *key, const void *payload) {
  const bool intact = std::memcmp(header.magic, kMagic, sizeof kMagic) == 0 &&
                      header.crc == header_crc(header) && header.version == kFormatVersion;
  const bool ours = intact && header.shards == format.shards && header.stride == format.stride &&
                    std::memcmp(header.geometry, format.geometry, 32) == 0 &&
                    std::memcmp(header.row, format.row, 32) == 0 &&
                    std::memcmp(header.key, key, kNamedKeyBytes) == 0;
  if (!ours) return kCorrupt;
  // The rightful holder of this name has another key: a collision of the truncated key, and no damage.
  if (std::memcmp(header.key, key, 32) != 0) return kMiss;
  for (std::uint32_t shard = 0; shard < format.shards; ++shard)
    if (header.shard_crc[shard] !=
        crc32c(static_cast<const char *>(payload) + shard * format.stride, format.stride))
      return kCorrupt;
  return kOk;
}

// Opens for reading without following a link at the end and without hanging on a pipe.
inline Descriptor open_object(int directory, const ObjectName &name, bool direct) {
  const Descriptor folder = open_folder(directory, name);
  if (!folder.valid()) return Descriptor();
  const int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
  const char *const path = name.file.c_str();
  Descriptor file(::openat(folder.number(), path, flags | (direct ? O_DIRECT : 0)));
  if (!file.valid() && direct && errno == EINVAL) file = Descriptor(::openat(folder.number(), path, flags));
  return file;
}

inline std::int32_t open_failure(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR: return kMiss;
    case ELOOP:
    case ENXIO: return kCorrupt;  // a link or a socket where an object should be
    default: return -error;
  }
}

// One object into `payload` (format.payload_bytes() of memory, of undefined content unless kOk comes back).
inline std::int32_t read_object(int directory, const ObjectName &name, const unsigned char *key,
                                const ObjectFormat &format, HeaderPage *header, void *payload,
                                bool direct) {
  const Descriptor file = open_object(directory, name, direct && page_aligned(payload));
  if (!file.valid()) return open_failure(errno);
  struct stat status;
  if (::fstat(file.number(), &status) != 0) return -errno;
  if (!S_ISREG(status.st_mode) || static_cast<std::size_t>(status.st_size) != format.object_bytes())
    return kCorrupt;
  const std::int32_t failure =
      transfer<::preadv>(file.number(), header, payload, format.payload_bytes());
  UCM_STEP("files.read.transferred");
  if (failure == -ENODATA) return kCorrupt;
  return failure != 0 ? failure : check_object(*header, format, key, payload);
}

// The folder, made on the first write into it.  Invalid, with errno, on failure.
inline Descriptor make_folder(int directory, const ObjectName &name) {
  Descriptor folder = open_folder(directory, name);
  if (!folder.valid() && errno == ENOENT) {
    if (::mkdirat(directory, name.folder.c_str(), 0777) != 0 && errno != EEXIST) return folder;
    UCM_STEP("files.folder.made");
    folder = open_folder(directory, name);
  }
  return folder;
}

// Creates the temporary.  Invalid, with errno, on failure.
inline Descriptor create_temporary(int folder, const char *path, bool direct) {
  const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  Descriptor file(::openat(folder, path, flags | (direct ? O_DIRECT : 0), 0666));
  if (!file.valid() && direct && errno == EINVAL) {
    // A file system that refuses O_DIRECT does so after it has created the file.
    ::unlinkat(folder, path, 0);
    file = Descriptor(::openat(folder, path, flags, 0666));
  }
  return file;
}

inline std::int32_t fill_file(Descriptor &file, HeaderPage *header, void *payload, std::size_t bytes,
                              bool sync) {
  std::int32_t failure = transfer<::pwritev>(file.number(), header, payload, bytes);
  UCM_STEP("files.write.transferred");
  if (failure == 0 && sync && ::fdatasync(file.number()) != 0) failure = -errno;
  UCM_STEP("files.write.synced");
  const std::int32_t closing = file.close();
  UCM_STEP("files.write.closed");
  return failure != 0 ? failure : closing;
}

// Publishes one object under its name, or leaves nothing behind.
inline std::int32_t write_object(int directory, const ObjectName &name, const std::string &temporary,
                                 const unsigned char *key, const ObjectFormat &format,
                                 HeaderPage *header, void *payload, bool direct, bool sync) {
  fill_header(*header, format, key, payload);
  const Descriptor folder = make_folder(directory, name);
  if (!folder.valid()) return -errno;
  const char *const path = temporary.c_str();
  Descriptor file = create_temporary(folder.number(), path, direct && page_aligned(payload));
  if (!file.valid()) return -errno;
  UCM_STEP("files.write.created");
  std::int32_t failure = fill_file(file, header, payload, format.payload_bytes(), sync);
  if (failure == 0 && ::renameat(folder.number(), path, folder.number(), name.file.c_str()) != 0)
    failure = -errno;
  UCM_STEP(failure == 0 ? "files.write.renamed" : "files.write.failed");
  if (failure != 0) ::unlinkat(folder.number(), path, 0);
  return failure;
}

inline std::int32_t sync_folder(int directory, const char *folder) {
  const Descriptor opened(::openat(directory, folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  return opened.valid() && ::fsync(opened.number()) == 0 ? 0 : -errno;
}

// Makes the renames of a batch survive a power loss: each folder once, then the directory of folders.
inline void sync_folders(int directory, const std::vector<ObjectName> &names, std::int32_t *results) {
  std::map<std::string, std::int32_t> folders;
  for (std::size_t n = 0; n < names.size(); ++n)
    if (results[n] == kOk) folders.emplace(names[n].folder, kOk);
  for (auto &[folder, failure] : folders) failure = sync_folder(directory, folder.c_str());
  const std::int32_t top_failure = folders.empty() ? kOk : sync_folder(directory, ".");
  for (std::size_t n = 0; n < names.size(); ++n)
    if (results[n] == kOk) results[n] = top_failure != kOk ? top_failure : folders[names[n].folder];
}

struct ObjectBatch {
  std::vector<ObjectName> names;
  const unsigned char *keys;      // 32 bytes each
  const std::int64_t *payloads;   // addresses
};

inline void read_objects(const char *path, const ObjectBatch &batch, const ObjectFormat &format,
                         bool direct, std::int32_t *results) {
  const Descriptor directory = open_directory(path);
  const std::int32_t failure = directory.valid() ? 0 : open_failure(errno);
  const HeaderMemory header = make_header_memory();
  for (std::size_t n = 0; n < batch.names.size(); ++n)
    results[n] = failure != 0 ? failure
                 : !header    ? -ENOMEM
                              : read_object(directory.number(), batch.names[n], batch.keys + 32 * n, format,
                                            header.get(), reinterpret_cast<void *>(batch.payloads[n]),
                                            direct);
}

inline void write_objects(const char *path, const ObjectBatch &batch,
                          const std::vector<std::string> &temporaries, const ObjectFormat &format,
                          bool direct, bool sync, std::int32_t *results) {
  const Descriptor directory = open_directory(path);
  const std::int32_t failure = directory.valid() ? 0 : -errno;
  const HeaderMemory header = make_header_memory();
  for (std::size_t n = 0; n < batch.names.size(); ++n)
    results[n] = failure != 0 ? failure
                 : !header    ? -ENOMEM
                              : write_object(directory.number(), batch.names[n], temporaries[n],
                                             batch.keys + 32 * n, format, header.get(),
                                             reinterpret_cast<void *>(batch.payloads[n]), direct, sync);
  if (sync && failure == 0) sync_folders(directory.number(), batch.names, results);
}

// Whether calls by path stay below `directory`: the folder is there and is no link.  Cheaper than to
// open it, and good enough where a wrong answer becomes a miss at the next read.
inline bool stays_inside(int directory, const ObjectName &name) {
  struct stat status;
  return ::fstatat(directory, name.folder.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 &&
         S_ISDIR(status.st_mode);
}

// 1 where a regular file of exactly `object_bytes` bears the name.
inline void stat_objects(const char *path, const std::vector<ObjectName> &names, std::uint64_t object_bytes,
                         std::uint8_t *present) {
  const Descriptor directory = open_directory(path);
  for (std::size_t n = 0; n < names.size(); ++n) {
    struct stat status;
    present[n] = directory.valid() && stays_inside(directory.number(), names[n]) &&
                 ::fstatat(directory.number(), names[n].path.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 &&
                 S_ISREG(status.st_mode) && static_cast<std::uint64_t>(status.st_size) == object_bytes;
  }
}

// Sets access and modification time to now; 1 where that was possible.
inline void touch_objects(const char *path, const std::vector<ObjectName> &names, std::uint8_t *touched) {
  const Descriptor directory = open_directory(path);
  for (std::size_t n = 0; n < names.size(); ++n)
    touched[n] = directory.valid() && stays_inside(directory.number(), names[n]) &&
                 ::utimensat(directory.number(), names[n].path.c_str(), nullptr, AT_SYMLINK_NOFOLLOW) == 0;
}

// True when an aligned write and read with O_DIRECT go through in this directory.  The file is removed.
inline bool probe_direct(const char *path, const std::string &temporary) {
  const Descriptor directory = open_directory(path);
  const auto memory = std::unique_ptr<char, PageDeleter>(
      static_cast<char *>(std::aligned_alloc(kPage, 2 * kPage)));
  if (!directory.valid() || !memory) return false;
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC | O_DIRECT;
  const Descriptor file(::openat(directory.number(), temporary.c_str(), flags, 0666));
  const bool refused = !file.valid() && errno != EINVAL;  // EINVAL comes after the file was made
  char *out = memory.get(), *in = memory.get() + kPage;
  std::memset(out, 0x5A, kPage);
  std::memset(in, 0, kPage);
  const bool works = file.valid() && ::pwrite(file.number(), out, kPage, 0) == static_cast<ssize_t>(kPage) &&
                     ::pread(file.number(), in, kPage, 0) == static_cast<ssize_t>(kPage) &&
                     std::memcmp(out, in, kPage) == 0;
  if (!refused) ::unlinkat(directory.number(), temporary.c_str(), 0);
  return works;
}

}  // namespace ucm
