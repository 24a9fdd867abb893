// What lies in a ring region, and the kernel calls that guard it. No Python here.
//
// A region is one file mapping, shared by every process of a node that caches the same geometry:
//
//   [0, 4096)              Header: who we are, plus what only the holder of the exclusive lock reads or writes
//   [free_stack, links)    uint32 slots[slots]: numbers of the EMPTY slots: a stack, then one of the reserve's
//   [links, index)         Links[slots]: where each slot stands among others
//   [index, slot)          uint64 words[index_words]: open addressing, word = tag << 32 | (slot + 1), 0 = unused
//   [slot, pins)           Slot[slots]: state word, owner, key
//   [pins, progress)       uint32 pins[slots][64]: references, one counter per slot and participant
//   [progress, backed)     uint32 progress[slots]: where those sleep who wait for a shard (ring_shards.hpp)
//   [backed, bits)         uint32 backed[slots]: 1 = the slot's payload has memory of its own
//   [bits, payload)        uint64 bits[slots][words]: which shards are full (ring_shards.hpp)
//   [payload, end)         slots x payload_bytes, 4096-aligned: address = base + payload + slot x payload_bytes
//
// The maker of the region takes the memory of all but the payload. A payload's is taken by the slot's first owner,
// before it may be written: nobody ever touches memory that is not there.
//
// Liveness is a lock, never a pid: participant k holds byte k of the file as an OFD lock for as long as it
// lives, byte 64 is the exclusive lock (structure), byte 65 the lifecycle lock (create, join, leave; taken by
// the caller).
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

#include "steps.hpp"

namespace ucm {

inline constexpr char kRingMagic[8] = {'U', 'C', 'M', 'R', 'I', 'N', 'G', '1'};
inline constexpr uint32_t kRingVersion = 3;
inline constexpr uint32_t kParticipants = 64;
inline constexpr uint64_t kRingPage = 4096;
inline constexpr uint32_t kExclusiveByte = 64;
inline constexpr uint32_t kLifecycleByte = 65;

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
       "a lock inside an atomic would not be shared between processes");

enum class SlotState : uint32_t { kEmpty = 0, kLoading = 1, kReady = 2, kFailed = 3, kClosing = 4 };
inline constexpr const char *kStateNames[5] = {"EMPTY", "LOADING", "READY", "FAILED", "CLOSING"};

// Who may move a slot along an edge; kExclusive = the holder of the exclusive lock. kNobody = the move is
// illegal: it throws and leaves the slot as it was.
enum class Mover : uint8_t { kNobody, kOwner, kExclusive, kOwnerOrExclusive };
inline constexpr const char *kMoverNames[4] = {"NOBODY", "OWNER", "EXCLUSIVE", "OWNER_OR_EXCLUSIVE"};

inline constexpr Mover kNone = Mover::kNobody, kOwn = Mover::kOwner, kExcl = Mover::kExclusive,
                       kBoth = Mover::kOwnerOrExclusive;

// The state machine. Closing is a victim's short stop on the way out: pinners that see it back off, and the
// evictor looks at the references once more before it empties the slot or puts it back.
inline constexpr Mover kMoves[5][5] = {
    // to:      Empty  Loading Ready  Failed Closing
    /* Empty   */ {kNone, kExcl, kNone, kNone, kNone},
    /* Loading */ {kNone, kNone, kOwn, kBoth, kNone},
    /* Ready   */ {kNone, kNone, kNone, kNone, kExcl},
    /* Failed  */ {kExcl, kNone, kNone, kNone, kNone},
    /* Closing */ {kExcl, kNone, kExcl, kNone, kNone},
};

// A slot's state word: version in the high half, state and two flags in the low half (the futex word).
// The version is raised whenever the slot is emptied, so (slot, version) names one stay of one block for ever.
struct Word {
  uint64_t bits = 0;

  static constexpr uint64_t kState = 7;
  static constexpr uint64_t kAccessed = 8;  // CLOCK: clear on insert, set by a hit, cleared by the passing hand
  static constexpr uint64_t kWaiting = 16;  // somebody sleeps on the low half: whoever leaves Loading must wake

  constexpr uint32_t version() const { return static_cast<uint32_t>(bits >> 32); }
  constexpr uint32_t low() const { return static_cast<uint32_t>(bits); }
  constexpr SlotState state() const { return static_cast<SlotState>(bits & kState); }
  constexpr bool accessed() const { return bits & kAccessed; }
  constexpr bool waiting() const { return bits & kWaiting; }
  constexpr bool pinnable() const { return state() == SlotState::kReady || state() == SlotState::kLoading; }
  // The word after a move. The accessed bit stays through a stay; sleepers are woken by whoever moves.
  Word moved(SlotState to) const {
    if (kMoves[static_cast<int>(state())][static_cast<int>(to)] == kNone)
      throw std::logic_error("a ring slot cannot go from state " + std::to_string(low() & kState) + " to " +
                             std::to_string(static_cast<int>(to)));
    if (to == SlotState::kEmpty) return Word{static_cast<uint64_t>(version() + 1) << 32};
    return Word{(bits & ~(kState | kWaiting)) | static_cast<uint64_t>(to)};
  }
};

// 256-bit content key. Compared over all 32 bytes; the hash below only picks a place in the index.
struct Key {
  std::array<uint64_t, 4> words;

  static Key from(const uint8_t *bytes) {
    Key key;
    std::memcpy(key.words.data(), bytes, sizeof key.words);
    return key;
  }
  bool operator==(const Key &other) const { return words == other.words; }
  uint32_t tag() const {
    constexpr uint64_t odd = 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio: multiplicative hashing (Knuth)
    uint64_t mixed = 0;
    for (uint64_t word : words) mixed = ((mixed ^ word) * odd) ^ (mixed >> 29);
    return static_cast<uint32_t>((mixed * odd) >> 32);
  }
};

// Which block goes when room is needed (ring_policy.hpp). The numbers are part of the region and of the Python API.
enum class Policy : uint32_t { kClock = 0, kFifo = 1, kLru = 2, kSieve = 3 };

// What the processes that share a ring must agree on, besides its geometry.
struct RingRules {
  Policy policy = Policy::kClock;
  uint32_t ttl_s = 0;  // seconds that a block stays after its last hit; 0 = for ever
};

inline constexpr uint32_t kNoSlot = 0xFFFFFFFF;

struct alignas(64) Slot {
  std::atomic<uint64_t> word;
  // Written only while the slot is Empty and off the free stack, i.e. before the release of Loading; a reader
  // that saw Loading or Ready before and the same version after its comparison compared a key at rest.
  std::atomic<uint64_t> key[4];
  // Participant that fills the slot; meaningful while Loading, written before Loading is released.
  std::atomic<uint32_t> owner;
  // Second of the last touch that was due; 0 = none in this stay. A race with a new stay costs or saves one touch.
  std::atomic<uint32_t> used_s;
  // Second of the shared clock from which on the block counts as absent; 0 = never.
  std::atomic<uint32_t> deadline_s;
  // When the slot was taken (LRU: or last hit), counted in slots taken in the whole ring.
  std::atomic<uint32_t> stamp;
  // Slot of the block before this one in its prefix, resident as long as it stands here; or kNoSlot.
  uint32_t parent;

  bool holds(const Key &wanted) const {
    for (int i = 0; i < 4; ++i)
      if (key[i].load(std::memory_order_acquire) != wanted.words[i]) return false;
    return true;
  }
  void write_key(const Key &wanted) {
    for (int i = 0; i < 4; ++i) key[i].store(wanted.words[i], std::memory_order_release);
  }
  Key read_key() const {
    Key copy;
    for (int i = 0; i < 4; ++i) copy.words[i] = key[i].load(std::memory_order_acquire);
    return copy;
  }
};
static_assert(sizeof(Slot) == 64, "one cache line");

inline constexpr uint32_t kOut = kNoSlot - 1;  // as a neighbour: not in that list

// Where a slot stands among others (ring_policy.hpp, ring_chains.hpp); derived from the slots.
struct Links {
  uint32_t older, newer;  // in the line of candidates
  uint32_t first_child, next_sibling, previous_sibling;
};

struct LineEnds {
  uint32_t oldest, newest, hand, length;
};

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t slots;
  uint64_t payload_bytes;
  uint8_t geometry_digest[32];
  RingRules rules;
  // Non-zero while somebody is inside the exclusive section. Found non-zero by the next holder of the lock: the
  // last one died in there, and the index and the free stack are rebuilt from the slots.
  std::atomic<uint32_t> dirty;
  std::atomic<uint32_t> tick;  // twice the slots taken so far, modulo 2^32: room for hits in between
  LineEnds line;
  uint32_t free_count, reserve_count;  // EMPTY slots below the reserve, and of it
  uint32_t swept_s;  // second in which expired blocks were last looked for
  uint64_t participants;  // bit k: entry k is taken (by a living or a not yet reaped participant)
  uint64_t evictions;
  uint64_t expired;  // blocks that went because their time was over
  uint64_t reaped;   // participants found dead
  uint64_t repairs;  // rebuilds after a death inside the exclusive section
  uint64_t refusals;        // claims for whose slot there was no memory
  uint32_t short_until_s;   // second of the shared clock until which slots that have memory come first
  uint32_t shards;          // of every payload
  uint64_t pids[kParticipants];  // for people only: prove nothing across containers
};
static_assert(sizeof(Header) <= kRingPage);

// Words of a slot that say which of its shards are full: 32 shards in each, see ring_shards.hpp.
constexpr uint32_t shard_words(uint32_t shards) { return (shards + 31) / 32; }

// Offsets of the parts of a region, in bytes; a pure function of slots, payload_bytes and shards.
struct RingLayout {
  uint64_t index_words, free_stack, links, index, slot, pins, progress, backed, bits, payload, total;

  RingLayout(uint32_t slots, uint64_t payload_bytes, uint32_t shards = 1) {
    index_words = 16;  // a power of two, at most half full: short probes, and a probe always ends
    while (index_words < 2 * static_cast<uint64_t>(slots)) index_words *= 2;
    free_stack = kRingPage;
    links = round_up(free_stack + slots * sizeof(uint32_t));
    index = round_up(links + slots * sizeof(Links));
    slot = round_up(index + index_words * sizeof(uint64_t));
    pins = round_up(slot + slots * sizeof(Slot));
    progress = round_up(pins + static_cast<uint64_t>(slots) * kParticipants * sizeof(uint32_t));
    backed = round_up(progress + slots * sizeof(uint32_t));
    bits = round_up(backed + slots * sizeof(uint32_t));
    payload = round_up(bits + static_cast<uint64_t>(slots) * shard_words(shards) * sizeof(uint64_t));
    total = payload + slots * payload_bytes;
  }
  static uint64_t round_up(uint64_t bytes) { return (bytes + kRingPage - 1) / kRingPage * kRingPage; }
};

// The mapped region and our own descriptor of it (same open file description as the one given, hence the same
// locks).
class Region {
public:
  Region(int fd, uint64_t bytes) : bytes_(bytes), fd_(fcntl(fd, F_DUPFD_CLOEXEC, 0)) {
    void *memory = fd_ < 0 ? MAP_FAILED : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (memory == MAP_FAILED) {
      const int error = errno;
      close_descriptor();
      throw std::system_error(error, std::generic_category(), "mapping the ring");
    }
    base_ = static_cast<uint8_t *>(memory);
    // A mapping keeps the open file description alive, and with it the locks: a forked child must not inherit
    // it, or the death of its parent would go unnoticed.
    madvise(base_, bytes, MADV_DONTFORK);
  }
  ~Region() {
    close_descriptor();
    if (getpid() == pid_) munmap(base_, bytes_);  // in a forked child something else may lie there
  }
  Region(const Region &) = delete;
  Region &operator=(const Region &) = delete;

  int fd() const { return fd_; }
  void close_descriptor() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }
  // Takes memory for [offset, offset + bytes), page-aligned; what is there stays as it is. 0, or the errno of why
  // there is none.
  int take(uint64_t offset, uint64_t bytes) const {
    constexpr int attempts = 1000;  // a signal, or work of the kernel in this thread, makes it begin again
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int error = EINTR;
    for (int i = 0; i < attempts && error == EINTR; ++i)
      error = posix_fallocate(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return error;
  }
  // Maps pages that are there, for writing. Without effect before Linux 5.14: they are mapped one by one then.
  void map_pages(uint64_t offset, uint64_t bytes) const {
    constexpr int populate_write = 23;  // MADV_POPULATE_WRITE, which older headers lack
    madvise(base_ + offset, bytes, populate_write);
  }
  bool ask_for_huge_pages(uint64_t offset) const {
    return madvise(base_ + offset, bytes_ - offset, MADV_HUGEPAGE) == 0;
  }
  // The addresses stay valid but show private memory from now on.
  void detach() {
    const int flags = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    mmap(base_, bytes_, PROT_READ | PROT_WRITE, flags, -1, 0);
  }
  template <class Record>
  Record *at(uint64_t offset) const {
    return reinterpret_cast<Record *>(base_ + offset);
  }

private:
  const pid_t pid_ = getpid();
  const uint64_t bytes_;
  int fd_;
  uint8_t *base_ = nullptr;
};

// One OFD lock request on one byte. OFD locks belong to the open file description: two threads of one
// description never conflict (a mutex goes in front), and the kernel lets go when the last descriptor closes,
// kill -9 included.
inline struct flock byte_lock(uint32_t byte, short type) {
  struct flock request {};
  request.l_type = type;
  request.l_whence = SEEK_SET;
  request.l_start = byte;
  request.l_len = 1;
  return request;
}

inline bool try_lock_byte(int fd, uint32_t byte) {
  struct flock request = byte_lock(byte, F_WRLCK);
  return fcntl(fd, F_OFD_SETLK, &request) == 0;
}

// False when the byte could not be had within `patience_ns`. Asks again and again, because waiting in the
// kernel has no end: a holder that was stopped would stop everybody.
inline bool lock_byte(int fd, uint32_t byte, int64_t patience_ns) {
  constexpr int64_t first_pause_ns = 10'000, last_pause_ns = 1'000'000;
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::nanoseconds(patience_ns);
  int64_t pause_ns = first_pause_ns;
  while (!try_lock_byte(fd, byte)) {
    const bool taken = errno == EAGAIN || errno == EACCES || errno == EINTR;  // else the system has no locks
    if (!taken || Clock::now() >= deadline) return false;
    const struct timespec pause {0, pause_ns};
    nanosleep(&pause, nullptr);
    pause_ns = std::min(2 * pause_ns, last_pause_ns);
  }
  return true;
}

inline void unlock_byte(int fd, uint32_t byte) {
  struct flock request = byte_lock(byte, F_UNLCK);
  fcntl(fd, F_OFD_SETLK, &request);
}

// True when another open file description holds the byte. Locks of `fd` itself do not count.
inline bool byte_is_held(int fd, uint32_t byte) {
  struct flock request = byte_lock(byte, F_WRLCK);
  if (fcntl(fd, F_OFD_GETLK, &request) != 0) return true;  // unknown counts as alive: never reap on a doubt
  return request.l_type != F_UNLCK;
}

// The futex word of a state word: its low half. Shared between processes, hence no FUTEX_PRIVATE_FLAG.
template <class Value>
inline uint32_t *futex_word(std::atomic<Value> &word) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half is the first four bytes");
  return reinterpret_cast<uint32_t*>(&word);
}

// Sleeps while the low half equals `seen`, at most `slice_ns`. True when the slice ran out, which signals do not
// put off, however many come.
template <class Value>
inline bool futex_wait(std::atomic<Value> &word, uint32_t seen, int64_t slice_ns) {
  constexpr int64_t second_ns = 1'000'000'000;
  struct timespec end {};  // a moment of the clock, so that a sleep that goes on still ends then
  clock_gettime(CLOCK_MONOTONIC, &end);
  end.tv_sec += (end.tv_nsec + slice_ns) / second_ns;
  end.tv_nsec = (end.tv_nsec + slice_ns) % second_ns;
  long rc;
  do {
    rc = syscall(SYS_futex, futex_word(word), FUTEX_WAIT_BITSET, seen, &end, nullptr, FUTEX_BITSET_MATCH_ANY);
  } while (rc != 0 && errno == EINTR);
  return rc != 0 && errno == ETIMEDOUT;
}

template <class Value>
inline void futex_wake_all(std::atomic<Value> &word) {
  syscall(SYS_futex, futex_word(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace ucm
