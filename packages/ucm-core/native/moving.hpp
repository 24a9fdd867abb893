// Objects on their way between memory and files: one vectored call each, by turns or many at once through io_uring.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include "object_format.hpp"
#include "steps.hpp"
#include "uring.hpp"

namespace ucm {

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

// Header and payload on their way in one vectored call, and in more of them after short answers.
class Transfer {
 public:
  Transfer() = default;
  Transfer(int fd, HeaderPage *header, void *payload, std::size_t payload_bytes)
      : fd_(fd), parts_{{header, kPage}, {payload, payload_bytes}} {}
  // Without the header: from `offset` on.
  Transfer(int fd, void *bytes, std::size_t count, std::size_t offset)
      : fd_(fd), parts_{{nullptr, 0}, {bytes, count}}, first_(1), offset_(static_cast<off_t>(offset)) {}

  int fd() const { return fd_; }
  const iovec *parts() const { return parts_ + first_; }
  unsigned count() const { return 2 - first_; }
  off_t offset() const { return offset_; }
  std::size_t moved() const { return static_cast<std::size_t>(offset_); }

  // Takes the answer of one call: bytes, or the negated errno.  False: call again; true: it is over with
  // failure(), which is 0, -errno, or -ENODATA at an early end of file.
  bool take(ssize_t answer) {
    if (answer == -EINTR || (answer == -EINVAL && leave_direct(fd_))) return false;
    if (answer <= 0) {
      failure_ = answer < 0 ? static_cast<std::int32_t>(answer) : -ENODATA;
      return true;
    }
    offset_ += answer;
    auto rest = static_cast<std::size_t>(answer);
    for (; first_ < 2 && rest >= parts_[first_].iov_len; ++first_) rest -= parts_[first_].iov_len;
    if (first_ == 2) return true;
    parts_[first_].iov_base = static_cast<char *>(parts_[first_].iov_base) + rest;
    parts_[first_].iov_len -= rest;
    return false;
  }
  std::int32_t failure() const { return failure_; }

  // All of it, or the rest, on this thread.
  void run(bool write) {
    for (;;) {
      const int parts_left = static_cast<int>(count());
      const ssize_t moved = write ? ::pwritev(fd_, parts(), parts_left, offset_)
                                  : ::preadv(fd_, parts(), parts_left, offset_);
      if (take(moved < 0 ? -errno : moved)) return;
    }
  }

 private:
  int fd_ = -1;
  iovec parts_[2] = {};
  unsigned first_ = 0;
  off_t offset_ = 0;
  std::int32_t failure_ = 0;
};

// One object under way: what an engine moves, and what is open for it meanwhile.
struct Moving {
  HeaderMemory header = make_header_memory();
  Descriptor folder, file;
  Transfer transfer;
};

// -- engines: both take every object of `work` through begin(), a transfer, and end(), with equal results.
//    `Work` has count(), begin(n, moving): false when n is over already, end(n, moving), lacks_files(n): whether that
//    was for want of file numbers, and kWrite.

inline bool lacks_files(std::int32_t code) { return code == -EMFILE || code == -ENFILE; }

// Where this process may open no more files it waits for those that other threads have open, half a second in all.
class FilePatience {
 public:
  bool wait() {
    ::usleep(kTurnUs);
    return --turns_ > 0;
  }

 private:
  static constexpr int kTurnUs = 1000;
  int turns_ = 500;
};

// Objects that one thread may have under way: few where few files may be open, as others need some too.
inline std::size_t uring_depth() {
  rlimit limit{};
  const bool known = ::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return known ? std::clamp<std::size_t>(limit.rlim_cur / 32, 1, kUringDepth) : kUringDepth;
}

template <class Work>
void move_in_turn(Work &work) {
  Moving moving;
  for (std::size_t n = 0; n < work.count(); ++n)
    if (work.begin(n, moving)) {
      moving.transfer.run(Work::kWrite);
      work.end(n, moving);
    }
}

// Many at once on one thread: while the device works on some, others are opened, verified and renamed.
template <class Work>
class UringMover {
 public:
  UringMover(Uring &ring, Work &work)
      : ring_(ring), work_(work), places_(std::min(work.count(), uring_depth())),
        object_(places_.size()) {
    for (std::size_t place = places_.size(); place-- > 0;) free_.push_back(place);
  }

  void run() {
    while (next_ < work_.count() || under_way_ > 0) {
      start_more();
      submit();
      if (under_way_ > 0) take(ring_.wait());
    }
  }

 private:
  void start_more() {
    while (next_ < work_.count() && !free_.empty()) {
      const std::size_t place = free_.back();
      object_[place] = next_;
      if (!work_.begin(next_, places_[place])) {
        if (work_.lacks_files(next_) && wait_for_files(places_[place])) return;
        ++next_;
        continue;
      }
      ++next_;
      free_.pop_back();
      ++under_way_;
      queue(place);
      if (Work::kWrite) submit();  // the device writes while the next one's checksums are computed
    }
  }
  void submit() {
    for (const std::uint64_t place : ring_.submit()) go_on_here(place);
    UCM_STEP("files.uring.submitted");
  }
  // The same object can be tried again when one of ours is done, or a little later, should others have all files.
  bool wait_for_files(Moving &moving) {
    moving.file.close();
    moving.folder.close();
    return under_way_ > 0 || patience_.wait();
  }
  void queue(std::size_t place) {
    const Transfer &transfer = places_[place].transfer;
    ring_.queue(Work::kWrite, transfer.fd(), transfer.parts(), transfer.count(), transfer.offset(), place);
  }
  void take(const Completion &completion) {
    const std::size_t place = completion.token;
    UCM_STEP("files.uring.completed");
    const std::int32_t answer = UCM_ANSWER("files.uring.answer", completion.answer);
    if (answer == -EAGAIN || answer == -ECANCELED)
      go_on_here(place);  // the ring's own troubles, not the file's
    else if (places_[place].transfer.take(answer))
      finish(place);
    else
      queue(place);
  }
  void go_on_here(std::size_t place) {
    places_[place].transfer.run(Work::kWrite);
    finish(place);
  }
  void finish(std::size_t place) {
    work_.end(object_[place], places_[place]);
    free_.push_back(place);
    --under_way_;
  }

  Uring &ring_;
  Work &work_;
  std::vector<Moving> places_;
  std::vector<std::size_t> object_;  // which one a place moves
  std::vector<std::size_t> free_;
  std::size_t next_ = 0, under_way_ = 0;
  FilePatience patience_;
};

template <class Work>
void move_all(Work &work, bool uring) {
  if (Uring *const ring = uring && work.count() > 1 ? Uring::of_this_thread() : nullptr)
    UringMover<Work>(*ring, work).run();
  else
    move_in_turn(work);
}

}  // namespace ucm
