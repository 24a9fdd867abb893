// What benchmarks hold the store against, compiled: plain calls of the kernel, without Python around them; and the
// ring as C++ sees it. Each line on stdin runs one round and answers "<wall ns> <processor ns>".
//
//   claims COUNT            claim and release as many hits, key by key
//   access FILE             access() of every path in FILE
//   files FOLDER COUNT BYTES MEMORY BEGIN
//     write|read threads N   N threads; a file is opened, moved in one call with O_DIRECT, closed (and renamed)
//     write|read uring N     the same with N transfers under way in one io_uring; no answer where it is refused
//     write|read bare N      N threads, nothing but the calls that move bytes
//     write new N            N threads; a file is made, written and closed, and has its name already
//     write checksum N       N threads, nothing but a pass of the checksum over the memory
//   MEMORY is the file of a ring, whose slots begin at byte BEGIN: transfers are twice as fast to pages that happen
//   to lie side by side, so this writes out of the first slots, as ours, and reads into those behind them. Files
//   lie in the folders 000 to 00f of FOLDER, where a disk may be faster or slower than elsewhere, and ours may too.
//   Each writing round makes new files, and each reading round reads those of another, the first of them first.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "crc32c.hpp"
#include "ring.hpp"

namespace {

std::int64_t now_ns(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

void require(bool condition, const std::string &what) {
  if (!condition) throw std::runtime_error(what + ": " + std::strerror(errno));
}

void timed(const std::function<void()> &round) {
  const std::int64_t wall = now_ns(CLOCK_MONOTONIC), processor = now_ns(CLOCK_PROCESS_CPUTIME_ID);
  round();
  std::cout << now_ns(CLOCK_MONOTONIC) - wall << ' ' << now_ns(CLOCK_PROCESS_CPUTIME_ID) - processor << std::endl;
}

void each_line(const std::function<void(std::istringstream &)> &answer) {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    answer(words);
  }
}

// -- the ring

void claims(std::uint32_t count) {
  const std::uint32_t slots = count + count / 8;  // some are kept for demand loads
  const int fd = memfd_create("ucm-bench", MFD_CLOEXEC);
  require(fd >= 0 && ftruncate(fd, ucm::RingLayout(slots, 4096).total) == 0, "memfd");
  const std::uint8_t digest[32] = {};
  ucm::Ring ring(fd, slots, 4096, digest);
  std::vector<ucm::Key> keys(count);
  std::uint64_t state = 1;
  for (ucm::Key &key : keys) {
    std::uint8_t bytes[32];
    for (std::uint8_t &byte : bytes) byte = static_cast<std::uint8_t>((state = state * 6364136223846793005u + 1) >> 56);
    key = ucm::Key::from(bytes);
    ucm::Ring::Claim claim;
    ring.claim(&key, 1, &claim);
    require(claim.outcome == ucm::Outcome::kOwner && ring.publish(claim.slot, nullptr), "publish");
    ring.release(claim.slot);
  }
  each_line([&](std::istringstream &) {
    timed([&] {
      for (const ucm::Key &key : keys) {
        ucm::Ring::Claim claim;
        ring.claim(&key, 1, &claim);
        if (claim.outcome != ucm::Outcome::kReady || !ring.release(claim.slot)) std::abort();
      }
    });
  });
}

void access_all(const char *list) {
  std::vector<std::string> paths;
  std::ifstream file(list);
  for (std::string path; std::getline(file, path);) paths.push_back(path);
  each_line([&](std::istringstream &) {
    timed([&] {
      for (const std::string &path : paths)
        if (access(path.c_str(), F_OK) != 0) std::abort();
    });
  });
}

// -- files

class Files {
public:
  Files(std::string folder, std::size_t count, std::size_t bytes, const char *memory, off_t begin)
      : folder_(std::move(folder)), count_(count), bytes_(bytes), fd_(count, -1) {
    const int fd = ::open(memory, O_RDWR | O_CLOEXEC);
    require(fd >= 0, memory);
    void *const mapped = mmap(nullptr, kRegions * count * bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, begin);
    require(mapped != MAP_FAILED, memory);
    ::close(fd);
    memory_ = static_cast<char *>(mapped);
    for (std::size_t n = 0; n < kFolders; ++n)
      require(mkdir(below(n).c_str(), 0777) == 0 || errno == EEXIST, below(n));
  }

  void run(std::istringstream &words) {
    std::string way, engine;
    std::size_t depth = 0;
    words >> way >> engine >> depth;
    const bool write = way == "write";
    if (engine == "checksum") return timed([&] { on_threads(depth, [&](std::size_t n) { sum(n); }); });
    region_ = write ? 0 : 1 + read_ % (kRegions - 1);
    generation_ = write ? ++written_ : read_++ % written_ + 1;
    if (engine == "bare") return bare(write, depth);
    if (engine == "new") return timed([&] { on_threads(depth, [&](std::size_t n) { make(n); }); });
    if (engine == "threads") return timed([&] { on_threads(depth, [&](std::size_t n) { whole(write, n); }); });
    uring(write, static_cast<unsigned>(depth));
  }

private:
  static constexpr std::size_t kFolders = 16, kRegions = 3;

  std::string below(std::size_t n) const { return folder_ + "/00" + "0123456789abcdef"[n % kFolders]; }
  std::string path(std::size_t n) const {
    return below(n) + "/" + std::to_string(getpid()) + "-" + std::to_string(generation_) + "-" + std::to_string(n);
  }
  std::string temporary(std::size_t n) const { return path(n) + ".tmp"; }
  char *memory(std::size_t n) const { return memory_ + (region_ * count_ + n) * bytes_; }

  void on_threads(std::size_t threads, const std::function<void(std::size_t)> &work) const {
    std::atomic<std::size_t> next{0};
    std::vector<std::thread> running;
    for (std::size_t t = 0; t < threads; ++t)
      running.emplace_back([&] {
        for (std::size_t n; (n = next.fetch_add(1)) < count_;) work(n);
      });
    for (std::thread &thread : running) thread.join();
  }

  static int create(const std::string &path) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC, 0666);
    require(fd >= 0, path);
    return fd;
  }

  int open(bool write, std::size_t n) const {
    const int fd = write ? create(temporary(n)) : ::open(path(n).c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    require(fd >= 0, path(n));
    return fd;
  }

  void move(bool write, std::size_t n, int fd) const {
    const iovec part{memory(n), bytes_};
    const ssize_t moved = write ? pwritev(fd, &part, 1, 0) : preadv(fd, &part, 1, 0);
    require(moved == static_cast<ssize_t>(bytes_), path(n));
  }

  void close(bool write, std::size_t n, int fd) const {
    require(::close(fd) == 0, path(n));
    if (write) require(rename(temporary(n).c_str(), path(n).c_str()) == 0, path(n));
  }

  void whole(bool write, std::size_t n) const {
    const int fd = open(write, n);
    move(write, n, fd);
    close(write, n, fd);
  }

  void sum(std::size_t n) const {
    static std::atomic<std::uint32_t> kept;  // so that the pass is not left out
    kept.store(ucm::crc32c(memory(n), bytes_), std::memory_order_relaxed);
  }

  void make(std::size_t n) const {
    const int fd = create(path(n));
    move(true, n, fd);
    require(::close(fd) == 0, path(n));
  }

  void bare(bool write, std::size_t threads) {
    for (std::size_t n = 0; n < count_; ++n) fd_[n] = open(write, n);
    timed([&] { on_threads(threads, [&](std::size_t n) { move(write, n, fd_[n]); }); });
    for (std::size_t n = 0; n < count_; ++n) close(write, n, fd_[n]);
  }

  void uring(bool write, unsigned depth);

  const std::string folder_;
  const std::size_t count_, bytes_;
  std::vector<int> fd_;
  char *memory_;
  unsigned region_ = 0, generation_ = 0, written_ = 0, read_ = 0;
};

// One io_uring with `depth` places, mapped the plain way.
struct Queue {
  explicit Queue(unsigned depth) {
    fd = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
    if (fd < 0) return;
    const std::size_t bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const std::size_t done_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    submit = map(bytes, IORING_OFF_SQ_RING), done = map(done_bytes, IORING_OFF_CQ_RING);
    entries = reinterpret_cast<io_uring_sqe *>(map(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
  }
  ~Queue() { if (fd >= 0) ::close(fd); }

  char *map(std::size_t bytes, std::uint64_t offset) const {
    void *const there = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
    require(there != MAP_FAILED, "io_uring");
    return static_cast<char *>(there);
  }
  static unsigned *number(char *base, unsigned offset) { return reinterpret_cast<unsigned *>(base + offset); }

  void push(const io_uring_sqe &entry) {
    unsigned *const tail = number(submit, params.sq_off.tail);
    const unsigned place = *tail & *number(submit, params.sq_off.ring_mask);
    entries[place] = entry;
    number(submit, params.sq_off.array)[place] = place;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    ++queued;
  }

  io_uring_cqe pop() {
    unsigned *const head = number(done, params.cq_off.head);
    while (queued > 0 || __atomic_load_n(number(done, params.cq_off.tail), __ATOMIC_ACQUIRE) == *head) {
      const long taken = syscall(__NR_io_uring_enter, fd, queued, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
      require(taken >= 0, "io_uring");
      queued -= static_cast<unsigned>(taken);
    }
    const auto *all = reinterpret_cast<io_uring_cqe *>(done + params.cq_off.cqes);
    const io_uring_cqe one = all[*head & *number(done, params.cq_off.ring_mask)];
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    return one;
  }

  io_uring_params params{};
  int fd = -1;
  unsigned queued = 0;
  char *submit = nullptr, *done = nullptr;
  io_uring_sqe *entries = nullptr;
};

void Files::uring(bool write, unsigned depth) {
  Queue queue(depth);
  if (queue.fd < 0) return void(std::cout << std::endl);
  const auto begin = [&](std::size_t n) {
    io_uring_sqe entry{};
    entry.opcode = write ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = fd_[n] = open(write, n);
    entry.addr = reinterpret_cast<std::uint64_t>(memory(n));
    entry.len = static_cast<unsigned>(bytes_);
    entry.user_data = n;
    queue.push(entry);
  };
  timed([&] {
    std::size_t next = 0;
    for (; next < count_ && next < depth; ++next) begin(next);
    for (std::size_t ended = 0; ended < count_; ++ended) {
      const io_uring_cqe one = queue.pop();
      require(one.res == static_cast<std::int32_t>(bytes_), "io_uring moved " + std::to_string(one.res));
      close(write, one.user_data, fd_[one.user_data]);
      if (next < count_) begin(next++);
    }
  });
}

}  // namespace

int main(int count, char **words) {
  try {
    const std::string what = count > 2 ? words[1] : "";
    if (what == "claims") claims(static_cast<std::uint32_t>(std::stoul(words[2])));
    if (what == "access") access_all(words[2]);
    if (what == "files" && count > 6) {
      Files files(words[2], std::stoul(words[3]), std::stoul(words[4]), words[5], std::stol(words[6]));
      each_line([&](std::istringstream &line) { files.run(line); });
    }
    return 0;
  } catch (const std::exception &error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
