// Objects at rest: one file per block and segment, a header page and then the shards.
//
// A file becomes visible by rename after all its bytes are down, so a name that exists is a whole object
// or a damaged one; reading proves which.  Nothing here throws or deletes a published object: every
// outcome is a code, and dropping is the caller's decision.
#pragma once

#include <algorithm>
#include <atomic>
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
#include <unistd.h>

#include "moving.hpp"
#include "object_format.hpp"
#include "steps.hpp"

namespace ucm {

inline Descriptor open_directory(const char *path) {
  return Descriptor(::open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

inline Descriptor open_directory_patiently(const char *path) {
  FilePatience patience;
  Descriptor directory = open_directory(path);
  while (!directory.valid() && lacks_files(-errno) && patience.wait()) directory = open_directory(path);
  return directory;
}

// A folder of objects, for calls relative to it.  A link in its place is not followed: it could lead anywhere.
inline Descriptor open_folder(int directory, const ObjectName &name) {
  return Descriptor(::openat(directory, name.folder(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

// Opens for reading without following a link at the end and without hanging on a pipe.
inline Descriptor open_object(int folder, const char *file_name, bool direct) {
  const int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
  Descriptor file(::openat(folder, file_name, flags | (direct ? O_DIRECT : 0)));
  if (!file.valid() && direct && errno == EINVAL) file = Descriptor(::openat(folder, file_name, flags));
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

// The folder, made on the first write into it.  Invalid, with errno, on failure.
inline Descriptor make_folder(int directory, const ObjectName &name) {
  Descriptor folder = open_folder(directory, name);
  if (!folder.valid() && errno == ENOENT) {
    if (::mkdirat(directory, name.folder(), 0777) != 0 && errno != EEXIST) return folder;
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

inline std::int32_t sync_folder(int directory, const char *folder) {
  const Descriptor opened(::openat(directory, folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  return opened.valid() && ::fsync(opened.number()) == 0 ? 0 : -errno;
}

// Whether calls by path stay below `directory`: the folder is there and is no link.  Cheaper than to
// open it, and good enough where a wrong answer becomes a miss at the next read.
inline bool stays_inside(int directory, const ObjectName &name) {
  struct stat status;
  return ::fstatat(directory, name.folder(), &status, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(status.st_mode);
}

inline bool older(const struct stat &status, std::int64_t not_before_ns) {
  const auto seconds = static_cast<std::int64_t>(status.st_mtim.tv_sec);
  return not_before_ns > 0 && seconds * 1'000'000'000 + status.st_mtim.tv_nsec < not_before_ns;
}

// Which folders were seen to be folders and no links.  A lookup believes it, and so costs one call per object; a
// read goes by descriptors, and where it cannot enter a folder the next lookup looks again.
class SeenFolders {
 public:
  bool leads_inside(int directory, const ObjectName &name) {
    std::atomic<bool> &seen = seen_[name.folder_number()];
    if (!seen.load(std::memory_order_relaxed) && stays_inside(directory, name))
      seen.store(true, std::memory_order_relaxed);
    return seen.load(std::memory_order_relaxed);
  }
  void forget(const ObjectName &name) {
    seen_[name.folder_number()].store(false, std::memory_order_relaxed);
  }

 private:
  std::atomic<bool> seen_[kFolders] = {};
};

// Keys and payloads of one call; object n is `keys + 32 * n` and `payloads[n]`.
struct ObjectBatch {
  std::size_t count;
  const unsigned char *keys;
  const std::int64_t *payloads;   // addresses

  const unsigned char *key(std::size_t n) const { return keys + 32 * n; }
  void *payload(std::size_t n) const { return reinterpret_cast<void *>(payloads[n]); }
};

// Keys, or only the part of them that is in names.
struct NameRows {
  std::size_t count, bytes;  // at least kNamedKeyBytes each
  const unsigned char *rows;

  const unsigned char *row(std::size_t n) const { return rows + bytes * n; }
};

// -- reading

class ReadWork {
 public:
  static constexpr bool kWrite = false;

  // `results` has a code for each shard of the range, of each object.
  ReadWork(int directory, const ObjectFormat &format, const std::string &segment, const ObjectBatch &batch,
           SeenFolders &seen, ShardRange range, std::int32_t *results)
      : directory_(directory), format_(format), segment_(segment), batch_(batch), seen_(seen), range_(range),
        results_(results) {}
  bool direct = false;
  std::int64_t not_before_ns = 0;

  std::size_t count() const { return batch_.count; }

  bool begin(std::size_t n, Moving &moving) {
    if (!moving.header) return give(n, -ENOMEM);
    const ObjectName name(batch_.key(n), segment_);
    moving.folder = open_folder(directory_, name);
    if (!moving.folder.valid()) {
      const int error = errno;
      seen_.forget(name);
      return give(n, open_failure(error));
    }
    void *const payload = batch_.payload(n);
    moving.file = open_object(moving.folder.number(), name.file(), direct && page_aligned(payload));
    if (!moving.file.valid()) return give(n, open_failure(errno));
    struct stat status;
    if (::fstat(moving.file.number(), &status) != 0) return give(n, -errno);
    if (!S_ISREG(status.st_mode)) return give(n, kCorrupt);
    if (older(status, not_before_ns)) return give(n, kMiss);
    const auto size = static_cast<std::size_t>(status.st_size);
    if (size != format_.object_bytes()) return wrong_size(n, moving, size);
    const std::size_t bytes = range_.count() * format_.stride;
    if (range_.begin == 0) {
      moving.transfer = Transfer(moving.file.number(), moving.header.get(), payload, bytes);
      return true;
    }
    Transfer header(moving.file.number(), moving.header.get(), nullptr, 0);
    header.run(false);
    if (header.failure() != 0) return give(n, header.failure() == -ENODATA ? kCorrupt : header.failure());
    const std::size_t before = range_.begin * format_.stride;
    moving.transfer = Transfer(moving.file.number(), static_cast<char *>(payload) + before, bytes, kPage + before);
    return true;
  }

  void end(std::size_t n, Moving &moving) {
    UCM_STEP("files.read.transferred");
    const std::int32_t failure = moving.transfer.failure();
    if (failure == -ENODATA) {
      mark_short(format_, moving.transfer.moved(), range_, of(n));
    } else if (failure != 0) {
      give(n, failure);
    } else {
      const std::int32_t code = check_header(*moving.header, format_, batch_.key(n));
      if (code == kOk)
        check_shards(*moving.header, format_, batch_.payload(n), range_, of(n));
      else
        give(n, code);
    }
    moving.file.close();
    moving.folder.close();
  }

  bool lacks_files(std::size_t n) const { return format_.shards > 0 && ucm::lacks_files(*of(n)); }

 private:
  std::int32_t *of(std::size_t n) const { return results_ + n * range_.count(); }
  bool give(std::size_t n, std::int32_t code) {
    std::fill_n(of(n), range_.count(), code);
    return false;
  }
  // Damage, unless its header says that it was never meant to have our size.
  bool wrong_size(std::size_t n, Moving &moving, std::size_t size) {
    if (size >= kPage) {
      Transfer header(moving.file.number(), moving.header.get(), nullptr, 0);
      header.run(false);
      if (header.failure() != 0 && header.failure() != -ENODATA) return give(n, header.failure());
      if (header.failure() == 0 && check_header(*moving.header, format_, batch_.key(n)) == kForeign)
        return give(n, kForeign);
    }
    if (size > format_.object_bytes()) return give(n, kCorrupt);
    mark_short(format_, size, range_, of(n));
    return false;
  }

  int directory_;
  const ObjectFormat &format_;
  const std::string &segment_;
  const ObjectBatch &batch_;
  SeenFolders &seen_;
  ShardRange range_;
  std::int32_t *results_;
};

// -- writing

class WriteWork {
 public:
  static constexpr bool kWrite = true;

  // `results` has a code for each object; `temporaries` a plain name that nobody else uses.
  WriteWork(int directory, const ObjectFormat &format, const std::string &segment, const ObjectBatch &batch,
            const std::vector<std::string> &temporaries, std::int32_t *results)
      : directory_(directory), format_(format), segment_(segment), batch_(batch), temporaries_(temporaries),
        results_(results) {}
  bool direct = false, sync = false;

  std::size_t count() const { return batch_.count; }

  bool begin(std::size_t n, Moving &moving) {
    if (!moving.header) return give(n, -ENOMEM);
    void *const payload = batch_.payload(n);
    fill_header(*moving.header, format_, batch_.key(n), payload);
    moving.folder = make_folder(directory_, ObjectName(batch_.key(n), segment_));
    if (!moving.folder.valid()) return give(n, -errno);
    moving.file = create_temporary(moving.folder.number(), temporaries_[n].c_str(),
                                   direct && page_aligned(payload));
    if (!moving.file.valid()) return give(n, -errno);
    UCM_STEP("files.write.created");
    moving.transfer =
        Transfer(moving.file.number(), moving.header.get(), payload, format_.payload_bytes());
    return true;
  }

  // Publishes the object under its name, or leaves nothing behind.
  void end(std::size_t n, Moving &moving) {
    std::int32_t failure = settle(moving);
    const char *const temporary = temporaries_[n].c_str();
    const ObjectName name(batch_.key(n), segment_);
    const int folder = moving.folder.number();
    if (failure == 0 && ::renameat(folder, temporary, folder, name.file()) != 0) failure = -errno;
    UCM_STEP(failure == 0 ? "files.write.renamed" : "files.write.failed");
    if (failure != 0) ::unlinkat(folder, temporary, 0);
    moving.folder.close();
    results_[n] = failure;
  }

  bool lacks_files(std::size_t n) const { return ucm::lacks_files(results_[n]); }

  // Makes the renames survive a power loss: each folder once, then the directory of folders.
  void sync_folders() {
    std::map<std::string, std::int32_t> folders;
    for (std::size_t n = 0; n < count(); ++n)
      if (results_[n] == kOk) folders.emplace(folder(n), kOk);
    for (auto &[name, failure] : folders) failure = sync_folder(directory_, name.c_str());
    const std::int32_t top_failure = folders.empty() ? kOk : sync_folder(directory_, ".");
    for (std::size_t n = 0; n < count(); ++n)
      if (results_[n] == kOk) results_[n] = top_failure != kOk ? top_failure : folders[folder(n)];
  }

 private:
  bool give(std::size_t n, std::int32_t code) {
    results_[n] = code;
    return false;
  }
  std::string folder(std::size_t n) const { return ObjectName(batch_.key(n), segment_).folder(); }
  std::int32_t settle(Moving &moving) const {
    std::int32_t failure = moving.transfer.failure();
    UCM_STEP("files.write.transferred");
    if (failure == 0 && sync && ::fdatasync(moving.file.number()) != 0) failure = -errno;
    UCM_STEP("files.write.synced");
    const std::int32_t closing = moving.file.close();
    UCM_STEP("files.write.closed");
    return failure != 0 ? failure : closing;
  }

  int directory_;
  const ObjectFormat &format_;
  const std::string &segment_;
  const ObjectBatch &batch_;
  const std::vector<std::string> &temporaries_;
  std::int32_t *results_;
};

// The objects of one row and segment, in one directory.  Thread-safe.
class ObjectFiles {
 public:
  ObjectFiles(std::string directory, std::string segment, const ObjectFormat &format, bool uring)
      : path_(std::move(directory)), segment_(std::move(segment)), format_(format), uring_(uring) {}

  const ObjectFormat &format() const { return format_; }

  // A code for each shard of the range, of each object; its bytes are defined only where all of them are kOk.
  // A file that was used last before `not_before_ns` is a miss (0: none is).
  void read(const ObjectBatch &batch, ShardRange range, bool direct, std::int64_t not_before_ns,
            std::int32_t *results) const {
    const Descriptor directory = open_directory_patiently(path_.c_str());
    if (!directory.valid()) {
      std::fill_n(results, batch.count * range.count(), open_failure(errno));
      return;
    }
    ReadWork work(directory.number(), format_, segment_, batch, seen_, range, results);
    work.direct = direct;
    work.not_before_ns = not_before_ns;
    move_all(work, uring_);
  }

  // A code for each object.
  void write(const ObjectBatch &batch, const std::vector<std::string> &temporaries, bool direct, bool sync,
             std::int32_t *results) const {
    const Descriptor directory = open_directory_patiently(path_.c_str());
    if (!directory.valid()) {
      std::fill_n(results, batch.count, -errno);
      return;
    }
    WriteWork work(directory.number(), format_, segment_, batch, temporaries, results);
    work.direct = direct;
    work.sync = sync;
    move_all(work, uring_);
    if (sync) work.sync_folders();
  }

  // 1 where a regular file of exactly an object's size bears the name, used since `not_before_ns`.
  void stat(const NameRows &names, std::int64_t not_before_ns, std::uint8_t *present) const {
    const Descriptor directory = open_directory(path_.c_str());
    for (std::size_t n = 0; n < names.count; ++n) {
      const ObjectName name(names.row(n), segment_);
      struct stat status;
      present[n] = directory.valid() && seen_.leads_inside(directory.number(), name) &&
                   ::fstatat(directory.number(), name.path(), &status, AT_SYMLINK_NOFOLLOW) == 0 &&
                   S_ISREG(status.st_mode) &&
                   static_cast<std::uint64_t>(status.st_size) == format_.object_bytes() &&
                   !older(status, not_before_ns);
    }
  }

  // Sets access and modification time to now; 1 where that was possible.
  void touch(const NameRows &names, std::uint8_t *touched) const {
    const Descriptor directory = open_directory(path_.c_str());
    for (std::size_t n = 0; n < names.count; ++n) {
      const ObjectName name(names.row(n), segment_);
      touched[n] = directory.valid() && stays_inside(directory.number(), name) &&
                   ::utimensat(directory.number(), name.path(), nullptr, AT_SYMLINK_NOFOLLOW) == 0;
    }
  }

 private:
  std::string path_, segment_;
  ObjectFormat format_;
  bool uring_;
  mutable SeenFolders seen_;
};

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
