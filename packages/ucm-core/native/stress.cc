// The race test of the ring, for sanitizers: Python calls are serialised by the GIL, these are not.
//
//   stress threads SECONDS     many threads of one participant
//   stress processes SECONDS   processes with threads, killed anywhere and replaced (forks: not under TSan)
//   stress files SECONDS       many threads that write, read, touch and remove the same objects
//
// Every payload is a function of its key, so any wrong byte seen under a reference is found. Exit status 0 =
// all well.
#include <sys/wait.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <unordered_map>

// Lets others run, or the killer strike, where it would hurt.
inline void linger() {
  const auto thread = std::hash<std::thread::id>()(std::this_thread::get_id());
  thread_local std::minstd_rand random(static_cast<unsigned>(thread));
  const auto dice = random() % 256;
  if (dice == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
  if (dice < 16) std::this_thread::yield();
}
#include "files.hpp"
#include "ring_copy.hpp"
#include "stress_files.hpp"

extern "C" void ucm_step(const char *) { linger(); }

namespace {

using ucm::Outcome;
using ucm::Ring;
using ucm::require;
using Clock = Ring::Clock;

constexpr uint32_t kSlots = 24;
constexpr uint64_t kPayloadBytes = 4096;
constexpr uint32_t kShards = 64;  // their bits take two words
constexpr uint64_t kShardWords = kPayloadBytes / 8 / kShards;
constexpr uint32_t kKeys = 40;  // more keys than slots, few enough to meet
constexpr int kBatch = 4, kMost = 16;
constexpr uint8_t kDigest[32] = {7};

ucm::Key key_of(uint32_t number) {
  std::mt19937_64 random(number);
  ucm::Key key;
  for (uint64_t &word : key.words) word = random();
  if (number % 4 != 0) key.words[0] = key.words[1] = key.words[2] = 1;  // most differ in their last bytes only
  return key;
}

uint64_t *payload(const Ring &ring, int32_t slot) { return reinterpret_cast<uint64_t *>(ring.address(slot)); }

void fill(const Ring &ring, int32_t slot, const ucm::Key &key, uint32_t begin, uint32_t end) {
  for (uint64_t i = begin * kShardWords; i < end * kShardWords; ++i) payload(ring, slot)[i] = key.words[3] * (i | 1);
}

void verify(const Ring &ring, int32_t slot, const ucm::Key &key, uint32_t begin = 0, uint32_t end = kShards) {
  for (uint64_t i = begin * kShardWords; i < end * kShardWords; ++i)
    require(payload(ring, slot)[i] == key.words[3] * (i | 1), "a referenced slot shows bytes of another key");
}

// Seconds of the clock that all share.
uint32_t now_s() {
  const auto now = std::chrono::duration_cast<std::chrono::seconds>(Clock::now().time_since_epoch());
  return static_cast<uint32_t>(now.count());
}

// What an engine has: a page for each key of a batch, in one layout, or cut into two.
class EngineMemory {
public:
  static constexpr ucm::Cut kCut{kShards, kPayloadBytes / kShards, kPayloadBytes / kShards};

  EngineMemory() {
    for (int64_t i = 0; i < kBatch; ++i) pieces_.push_back({i, 0, kBatch - 1 - i, 0, 1});
    parts_[0] = part(0, kPayloadBytes);  // so long that it goes past the caches
    parts_[1] = part(0, kHalf);
    parts_[2] = part(kHalf, kHalf);
  }
  EngineMemory(const EngineMemory &) = delete;
  EngineMemory &operator=(const EngineMemory &) = delete;

  // Where the first `count` objects are.
  ucm::Layouts layouts(size_t count, bool cut) const {
    const ucm::PieceRow *const pieces = pieces_.data();
    if (!cut) return {{&parts_[0], 1, pieces, count}};
    return {{&parts_[1], 1, pieces, count}, {&parts_[2], 1, pieces, count}};
  }
  void clear() { std::fill(words_.begin(), words_.end(), 0); }
  void fill(uint32_t object, const ucm::Key &key) {
    for (uint64_t i = 0; i < kWords; ++i) page(object)[i] = key.words[3] * (i | 1);
  }
  bool has(uint32_t object, const ucm::Key &key) {
    for (uint64_t i = 0; i < kWords; ++i)
      if (page(object)[i] != key.words[3] * (i | 1)) return false;
    return true;
  }
  bool is_clear(uint32_t object) {
    return std::all_of(page(object), page(object) + kWords, [](uint64_t word) { return word == 0; });
  }

private:
  static constexpr uint64_t kWords = kPayloadBytes / 8;
  static constexpr int64_t kHalf = kPayloadBytes / 2;

  // Bytes [begin, begin + count) of a payload, at the same place of a page.
  ucm::PartRow part(int64_t begin, int64_t count) {
    const int64_t base = reinterpret_cast<int64_t>(words_.data()) + begin;
    return {base, kPayloadBytes, kPayloadBytes, count, 1, 1, count, 1, begin};
  }
  uint64_t *page(uint32_t object) { return words_.data() + kWords * (kBatch - 1 - object); }

  std::vector<uint64_t> words_ = std::vector<uint64_t>(kBatch * kWords);
  std::vector<ucm::PieceRow> pieces_;
  ucm::PartRow parts_[3];
};

class Worker {
public:
  Worker(Ring &ring, uint64_t seed) : ring_(ring), random_(seed) {}

  void run(Clock::time_point end) {
    while (Clock::now() < end) step();
  }

private:
  uint32_t pick(uint32_t count) { return static_cast<uint32_t>(random_() % count); }

  void step() {
    ucm::Key keys[kBatch];
    for (ucm::Key &key : keys) key = key_of(pick(kKeys));
    const uint32_t action = pick(20);
    if (action < 7) {
      claim_and_settle(keys, kBatch);
    } else if (action == 7) {  // so many that there is often no room for the whole
      ucm::Key many[kMost];
      for (ucm::Key &key : many) key = key_of(pick(kKeys));
      claim_and_settle(many, kMost);
    } else if (action < 13) {
      for (const ucm::Key &key : keys) use(key, ring_.pin(key, now_s()));
    } else if (action == 13) {
      for (const ucm::Key &key : keys) if (ring_.lookup(key)) ring_.touch(key, now_s(), 1);
    } else if (action < 18) {
      copy(keys);
    } else if (action == 18) {
      uint8_t dropped[kBatch];
      ring_.drop(keys, 1 + pick(kBatch), dropped);
    } else {
      const std::string problem = ring_.check_integrity();
      require(problem.empty(), problem.c_str());
    }
  }

  // Fills and settles what it owns before it waits for anybody, so that no two workers wait for each other.
  void claim_and_settle(const ucm::Key *keys, int count) {
    Ring::Claim claims[kMost];
    ucm::Key parents[kMost] = {};
    for (int i = 1; i < count; ++i) parents[i] = pick(4) == 0 ? key_of(pick(kKeys)) : keys[i - 1];
    const bool whole = count == kMost || pick(4) == 0;
    ring_.claim(keys, count, claims, {pick(3) == 0 ? nullptr : parents, now_s(), whole, pick(2) == 0});
    for (int i = 0; i < count; ++i) {
      if (claims[i].outcome != Outcome::kOwner) continue;
      const uint32_t early = fill_some_shards(claims[i], keys[i]);
      fill(ring_, claims[i].slot, keys[i], early, kShards);
      settle(claims[i], early);
    }
    for (int i = 0; i < count; ++i) use(keys[i], claims[i]);
  }

  // Publishes the first shards one part after the other, none as often as not; returns where the rest begins.
  uint32_t fill_some_shards(const Ring::Claim &claim, const ucm::Key &key) {
    uint32_t begin = 0;
    while (pick(2) == 0 && begin + kShards / 4 < kShards) {
      const uint32_t end = begin + 1 + pick(kShards / 4);
      fill(ring_, claim.slot, key, begin, end);
      require(ring_.publish_shards(claim.slot, claim.version, begin, end), "an owner could not publish shards");
      begin = end;
    }
    return begin;
  }

  void copy(const ucm::Key *keys) {
    if (pick(2) == 0)
      copy_in(keys);
    else
      copy_out(keys);
  }

  // A batch of saves by one call: what is ours is filled, and everybody's, when it returns.
  void copy_in(const ucm::Key *keys) {
    Ring::Claim claims[kBatch];
    for (uint32_t i = 0; i < kBatch; ++i) memory_.fill(i, keys[i]);
    const ucm::Layouts layouts = memory_.layouts(kBatch, pick(2) == 0);
    ucm::gather(ring_, keys, kBatch, claims, {nullptr, now_s()}, layouts, EngineMemory::kCut);
    for (uint32_t i = 0; i < kBatch; ++i) {
      if (claims[i].outcome == Outcome::kOwner) {
        late_ = claims[i];
        claims[i].outcome = Outcome::kReady;
      }
      use(keys[i], claims[i]);
    }
  }

  // A batch of loads by one call: every byte, or none.
  void copy_out(const ucm::Key *keys) {
    const uint32_t count = 1 + pick(kBatch);
    memory_.clear();
    const bool whole = ucm::scatter(ring_, keys, count, memory_.layouts(count, pick(2) == 0), now_s());
    for (uint32_t i = 0; i < count; ++i)
      require(whole ? memory_.has(i, keys[i]) : memory_.is_clear(i), "a copy has bytes that are not its key's");
  }

  void settle(Ring::Claim &claim, uint32_t early) {
    uint8_t aborted = 0;
    if (pick(5) == 0) {
      ring_.abort(&claim.slot, &claim.version, 1, &aborted);
      require(aborted == 1, "an owner could not abort");
    } else {
      const bool done = pick(2) == 0 ? ring_.publish(claim.slot, &claim.version)
                                     : ring_.publish_shards(claim.slot, claim.version, early, kShards);
      require(done, "an owner could not publish");
      claim.outcome = Outcome::kReady;
    }
    late_ = claim;
    if (aborted == 1) claim.slot = -1;
  }

  void use(const ucm::Key &key, Ring::Claim claim) {
    require(!ring_.publish(late_.slot, &late_.version), "a late writer could publish");
    require(!ring_.publish_shards(late_.slot, late_.version, 0, kShards), "a late writer could publish shards");
    if (claim.slot < 0) return;
    if (claim.outcome == Outcome::kLoading) use_shard(key, claim, pick(kShards / 2));
    if (claim.outcome == Outcome::kLoading)
      claim.outcome = ring_.wait(claim.slot, claim.version, Clock::now() + std::chrono::seconds(20));
    require(claim.outcome != Outcome::kTimeout, "a wait did not end");
    if (claim.outcome == Outcome::kReady) verify(ring_, claim.slot, key);
    require(ring_.release(claim.slot, now_s()), "a reference was lost");
  }

  void use_shard(const ucm::Key &key, const Ring::Claim &claim, uint32_t shard) {
    const auto end = Clock::now() + std::chrono::seconds(20);
    const Outcome outcome = ring_.wait_for_shard(claim.slot, claim.version, shard, end);
    require(outcome != Outcome::kTimeout, "a wait for a shard did not end");
    if (outcome == Outcome::kReady) verify(ring_, claim.slot, key, shard, shard + 1);
  }

  Ring &ring_;
  std::mt19937_64 random_;
  EngineMemory memory_;
  Ring::Claim late_{0, Outcome::kFailed, 0xFFFFFFFF};
};

void work(Ring &ring, int threads, uint64_t seed, Clock::time_point end) {
  std::vector<std::thread> workers;
  for (int i = 0; i < threads; ++i)
    workers.emplace_back([&ring, seed, i, end] { Worker(ring, seed * 100 + static_cast<uint64_t>(i)).run(end); });
  for (std::thread &worker : workers) worker.join();
}

void check_balances(Ring &ring) {
  const std::string problem = ring.check_integrity();
  require(problem.empty(), problem.c_str());
  const ucm::RingStatistics end = ring.statistics();
  require(end.pinned == 0 && end.own_references == 0, "references are left");
  require(end.loading == 0, "a slot is still LOADING");
  require(end.participants == 1, "a participant is left");
  require(end.evictions > 0, "nothing was ever evicted: the test is too small");
  std::printf("stress: %lu evictions, %lu reaped, %lu repairs\n", end.evictions, end.reaped, end.repairs);
}

int new_region() {
  const int fd = memfd_create("ucm-stress", MFD_CLOEXEC);
  const auto bytes = static_cast<off_t>(ucm::RingLayout(kSlots, kPayloadBytes, kShards).total);
  require(fd >= 0 && ftruncate(fd, bytes) == 0, "memfd");
  return fd;
}

constexpr ucm::RingRules kRules[] = {
    {ucm::Policy::kClock, 1}, {ucm::Policy::kFifo, 0}, {ucm::Policy::kSieve, 0}, {ucm::Policy::kLru, 1}};

void run_threads(int seconds) {
  for (const ucm::RingRules &rules : kRules) {
    const int fd = new_region();
    Ring ring(fd, kSlots, kPayloadBytes, kDigest, rules, kShards);
    work(ring, 6, 1, Clock::now() + std::chrono::milliseconds(250 * seconds));
    check_balances(ring);
    close(fd);
  }
}

// A descriptor of its own for the same file: locks belong to the open file description.
int reopen(int fd) { return open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_CLOEXEC); }

[[noreturn]] void child(int inherited, uint64_t seed) {
  const int fd = reopen(inherited);
  close(inherited);
  Ring ring(fd, kSlots, kPayloadBytes, nullptr, {}, kShards);
  close(fd);
  work(ring, 2, seed, Clock::now() + std::chrono::milliseconds(seed % 4 == 0 ? 20 : 100'000));
  ring.leave();
  std::_Exit(0);
}

pid_t start(int fd, uint64_t seed) {
  const pid_t pid = fork();
  require(pid >= 0, "fork");
  if (pid == 0) child(fd, seed);
  return pid;
}

void stop(pid_t pid) {
  kill(pid, SIGKILL);
  int status = 0;
  require(waitpid(pid, &status, 0) == pid, "waitpid");
  const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  require(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0), "a process found a fault");
}

void run_processes(const ucm::RingRules &rules, Clock::time_point end) {
  const int fd = new_region();
  { Ring(fd, kSlots, kPayloadBytes, kDigest, rules, kShards); }
  std::mt19937_64 random(2);
  uint64_t seed = 1;
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) children.push_back(start(fd, seed++));
  while (Clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 30'000));
    pid_t &victim = children[random() % children.size()];
    stop(victim);
    victim = start(fd, seed++);
  }
  for (const pid_t pid : children) stop(pid);
  Ring ring(reopen(fd), kSlots, kPayloadBytes, nullptr, {}, kShards);
  require(ring.statistics().reaped > 0, "nobody was reaped");
  check_balances(ring);
}

void run_processes(int seconds) {
  for (const ucm::RingRules &rules : kRules)
    run_processes(rules, Clock::now() + std::chrono::milliseconds(250 * seconds));
}

// Two keys under one tag that differ in their last word only: the index cannot tell them apart, the slots must.
void check_collisions() {
  std::unordered_map<uint32_t, uint64_t> seen;
  ucm::Key twins[2] = {{{1, 1, 1, 0}}, {{1, 1, 1, 0}}};
  for (uint64_t last = 0; seen.emplace(twins[0].tag(), last).second; twins[0].words[3] = ++last) {
  }
  twins[1].words[3] = seen[twins[0].tag()];
  const int fd = new_region();
  Ring ring(fd, kSlots, kPayloadBytes, kDigest, {}, kShards);
  for (const ucm::Key &key : twins) {
    Ring::Claim claim;
    require(!ring.lookup(key), "a key hits another of the same tag");
    ring.claim(&key, 1, &claim);
    require(claim.outcome == Outcome::kOwner && ring.publish(claim.slot, nullptr), "a key joins another");
    require(ring.release(claim.slot), "a reference was lost");
  }
  uint8_t dropped = 0;
  ring.drop(&twins[0], 1, &dropped);
  require(dropped == 1 && !ring.lookup(twins[0]) && ring.lookup(twins[1]), "the wrong twin was dropped");
}

// Waiters are woken and do not just find out when a slice of 50 ms ends: 40 hand-overs take far less than 2 s.
void check_wakes() {
  const int fd = new_region();
  Ring ring(fd, kSlots, kPayloadBytes, kDigest, {}, kShards);
  const auto begin = Clock::now();
  for (uint32_t number = 0; number < 40; ++number) {
    const ucm::Key key = key_of(number);
    Ring::Claim mine;
    ring.claim(&key, 1, &mine);
    const Ring::Claim other = ring.pin(key);
    std::thread waiter([&] { ring.wait(other.slot, other.version, begin + std::chrono::seconds(60)); });
    while (!ring.has_sleeper(other.slot)) std::this_thread::yield();
    ring.publish(mine.slot, nullptr);
    waiter.join();
    require(ring.release(mine.slot) && ring.release(other.slot), "a reference was lost");
  }
  require(Clock::now() - begin < std::chrono::seconds(1), "waiters are not woken");
}

// As check_wakes, for those who wait for one shard; who sleeps cannot be seen, so they get the time to.
void check_wakes_of_shards() {
  const int fd = new_region();
  Ring ring(fd, kSlots, kPayloadBytes, kDigest, {}, kShards);
  const auto begin = Clock::now();
  for (uint32_t number = 0; number < 40; ++number) {
    const uint32_t shard = number % (kShards / 2);
    const ucm::Key key = key_of(number);
    Ring::Claim mine;
    ring.claim(&key, 1, &mine);
    std::thread waiter(
        [&] { ring.wait_for_shard(mine.slot, mine.version, shard, begin + std::chrono::seconds(60)); });
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    require(ring.publish_shards(mine.slot, mine.version, shard, shard + 1), "an owner could not publish a shard");
    waiter.join();
    ring.publish(mine.slot, nullptr);
    require(ring.release(mine.slot), "a reference was lost");
  }
  require(Clock::now() - begin < std::chrono::seconds(1), "waiters for shards are not woken");
}

// Every pair of states: legal moves arrive, illegal ones throw.
void check_moves() {
  for (uint64_t from = 0; from < 5; ++from)
    for (uint64_t to = 0; to < 5; ++to) {
      bool moved = true;
      try {
        const auto arrived = ucm::Word{from}.moved(static_cast<ucm::SlotState>(to)).state();
        require(arrived == static_cast<ucm::SlotState>(to), "a move went astray");
      } catch (const std::logic_error &) {
        moved = false;
      }
      require(moved == (ucm::kMoves[from][to] != ucm::Mover::kNobody), "the state table is not obeyed");
    }
}

}  // namespace

int main(int count, char **arguments) {
  require(count == 3, "usage: stress threads|processes|files SECONDS");
  check_moves();
  check_collisions();
  check_wakes();
  check_wakes_of_shards();
  const int seconds = std::atoi(arguments[2]);
  const std::string mode = arguments[1];
  mode == "threads" ? run_threads(seconds) : mode == "processes" ? run_processes(seconds) : ucm::run_files(seconds);
}
