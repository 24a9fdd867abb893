// io_uring without a library: vectored reads and writes of one thread, many under way at once.
//
// An opt-in: many containers forbid these calls, so whoever wants them probes first and has threads with
// preadv/pwritev to fall back to. A ring belongs to the thread that made it and is never shared.
#pragma once

#include <cerrno>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>) && defined(__NR_io_uring_setup)
#define UCM_HAS_URING 1
#endif
#endif

#if defined(UCM_HAS_URING)
#include <linux/io_uring.h>
#endif

namespace ucm {

constexpr unsigned kUringDepth = 16;  // objects under way at once

struct Completion {
  std::uint64_t token;
  std::int32_t answer;  // bytes, or the negated errno
};

#if defined(UCM_HAS_URING)

class Uring {
 public:
  // The calling thread's ring, made at its first use; null where the kernel refuses.
  static Uring *of_this_thread() {
    thread_local std::unique_ptr<Uring> ring;
    if (ring && ring->pid_ != ::getpid()) ring.release();  // the parent's: its memory is shared with it
    if (!ring) {
      ring.reset(new Uring);
      if (!ring->ready()) ring.reset();
    }
    return ring.get();
  }

  ~Uring() {
    if (entries_ != MAP_FAILED) ::munmap(entries_, entry_bytes_);
    if (rings_ != MAP_FAILED) ::munmap(rings_, ring_bytes_);
    if (fd_ >= 0) ::close(fd_);
  }
  Uring(const Uring &) = delete;
  Uring &operator=(const Uring &) = delete;

  // Queues one transfer; at most kUringDepth may be queued or under way. `parts` stay valid until its completion.
  void queue(bool write, int fd, const iovec *parts, unsigned count, std::int64_t offset,
             std::uint64_t token) {
    const unsigned tail = *submit_tail_;
    io_uring_sqe &entry = entries()[tail & submit_mask_];
    entry = {};
    entry.opcode = write ? IORING_OP_WRITEV : IORING_OP_READV;
    entry.fd = fd;
    entry.addr = reinterpret_cast<std::uint64_t>(parts);
    entry.len = count;
    entry.off = static_cast<std::uint64_t>(offset);
    entry.user_data = token;
    submit_array_[tail & submit_mask_] = tail & submit_mask_;
    __atomic_store_n(submit_tail_, tail + 1, __ATOMIC_RELEASE);
    queued_.push_back(token);
  }

  // Hands what is queued to the kernel, and returns the tokens that it did not take: they will never complete.
  std::vector<std::uint64_t> submit() {
    std::size_t taken = 0;
    while (taken < queued_.size()) {
      const long answer = ::syscall(__NR_io_uring_enter, fd_, queued_.size() - taken, 0, 0, nullptr, 0);
      if (answer < 0 && errno == EINTR) continue;
      if (answer <= 0) break;
      taken += static_cast<std::size_t>(answer);
    }
    std::vector<std::uint64_t> left(queued_.begin() + static_cast<std::ptrdiff_t>(taken), queued_.end());
    queued_.clear();
    // Without a polling thread the kernel looks at the queue only within the call, so it can be taken back.
    __atomic_store_n(submit_tail_, *submit_tail_ - static_cast<unsigned>(left.size()), __ATOMIC_RELEASE);
    return left;
  }

  // The next completion; something must be under way. What the kernel has taken it completes, also when
  // it refuses to be waited for: the memory is in use until then, so there is nothing to give up on.
  Completion wait() {
    const unsigned head = *complete_head_;
    while (__atomic_load_n(complete_tail_, __ATOMIC_ACQUIRE) == head)
      if (::syscall(__NR_io_uring_enter, fd_, 0, 1, IORING_ENTER_GETEVENTS, nullptr, 0) < 0 &&
          errno != EINTR)
        ::usleep(50);
    const io_uring_cqe &entry = completions_[head & complete_mask_];
    const Completion completion{entry.user_data, entry.res};
    __atomic_store_n(complete_head_, head + 1, __ATOMIC_RELEASE);
    return completion;
  }

 private:
  Uring() : pid_(::getpid()) {
    io_uring_params params{};
    fd_ = static_cast<int>(::syscall(__NR_io_uring_setup, kUringDepth, &params));
    if (fd_ < 0 || !(params.features & IORING_FEAT_SINGLE_MMAP)) return;
    const std::size_t submit_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const std::size_t complete_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    ring_bytes_ = submit_bytes > complete_bytes ? submit_bytes : complete_bytes;
    entry_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    rings_ = map(ring_bytes_, IORING_OFF_SQ_RING);
    entries_ = map(entry_bytes_, IORING_OFF_SQES);
    if (!ready()) return;
    char *const base = static_cast<char *>(rings_);
    const auto at = [base](std::uint32_t offset) { return reinterpret_cast<unsigned *>(base + offset); };
    submit_tail_ = at(params.sq_off.tail);
    submit_array_ = at(params.sq_off.array);
    submit_mask_ = *at(params.sq_off.ring_mask);
    complete_head_ = at(params.cq_off.head);
    complete_tail_ = at(params.cq_off.tail);
    complete_mask_ = *at(params.cq_off.ring_mask);
    completions_ = reinterpret_cast<const io_uring_cqe *>(base + params.cq_off.cqes);
  }

  bool ready() const { return rings_ != MAP_FAILED && entries_ != MAP_FAILED; }
  io_uring_sqe *entries() { return static_cast<io_uring_sqe *>(entries_); }

  void *map(std::size_t bytes, std::uint64_t offset) {
    return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                  static_cast<off_t>(offset));
  }

  pid_t pid_;
  int fd_ = -1;
  void *rings_ = MAP_FAILED, *entries_ = MAP_FAILED;
  std::size_t ring_bytes_ = 0, entry_bytes_ = 0;
  unsigned *submit_tail_ = nullptr, *submit_array_ = nullptr, submit_mask_ = 0;
  unsigned *complete_head_ = nullptr, *complete_tail_ = nullptr, complete_mask_ = 0;
  const io_uring_cqe *completions_ = nullptr;
  std::vector<std::uint64_t> queued_;
};

#else  // built where the kernel's header is not known: never ready

class Uring {
 public:
  static Uring *of_this_thread() { return nullptr; }
  void queue(bool, int, const iovec *, unsigned, std::int64_t, std::uint64_t) {}
  std::vector<std::uint64_t> submit() { return {}; }
  Completion wait() { return {}; }
};

#endif

}  // namespace ucm
