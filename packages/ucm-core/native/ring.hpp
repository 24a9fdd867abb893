// The host ring: a content-addressed cache of fixed-size slots that all processes of a node share. No Python
// here.
//
// Two kinds of work, kept apart on purpose:
//  - what happens per block (find, pin, release, touch, publish, wait) is lock-free: atomics on the slot;
//  - what changes the structure (claim of an absent key, abort, drop, join, leave, reap) runs under the
//    exclusive lock, an OFD lock that the kernel takes back from the dead. Slots are the truth; index and free
//    stack are derived and are rebuilt when a holder died inside.
//
// References are counted per participant and never summed up: pins[slot][k] belongs to participant k. A dead
// participant's references are its own counters, so setting them to zero is exact wherever it died.
//
// Memory order, the two pairs that everything rests on:
//  - a pinner raises its counter, then reads the word; an evictor moves the word to Closing, then reads the
//    counters (all seq_cst). Whatever the interleaving, one of them sees the other and backs off;
//  - payload bytes are ordinary memory: the owner writes them before it releases Ready; a reader acquires Ready
//    before it reads them; a reader's release of its reference is acquired by the evictor before the slot gets
//    a new owner.
#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "ring_admission.hpp"

namespace ucm {

struct RingClosed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The exclusive lock is held by somebody who does not go on.
struct RingStuck : std::runtime_error {
  RingStuck() : std::runtime_error("the ring's lock is held by a process that does not go on") {}
};

class Ring : public RingAdmission {
public:
  // Maps the region behind `fd` and joins it. The caller holds the lifecycle lock and has made the file
  // RingLayout(slots, payload_bytes, shards).total bytes long, with memory for all but the payloads.
  // `geometry_digest`: the file is all zeros and gets its header here, with `rules`; null: slots, payload_bytes
  // and shards are those of the header, whose rules hold. Throws std::system_error, or std::runtime_error when
  // all participants are taken by the living.
  Ring(int fd, uint32_t slots, uint64_t payload_bytes, const uint8_t *geometry_digest, RingRules rules = {},
       uint32_t shards = 1)
      : RingAdmission(fd, slots, payload_bytes, shards), pid_(getpid()) {
    if (geometry_digest != nullptr) initialise(geometry_digest, rules);
    join();
  }
  ~Ring() { leave(); }

  // Leaves the ring: own LOADING slots fail, own references go, waits in this process end. The caller holds the
  // lifecycle lock. Addresses stay mapped until destruction but show private memory: a late copy of a careless
  // caller neither crashes nor reaches what is shared. In a forked child it does nothing: the parent is still
  // there.
  void leave() {
    closing_.store(true);
    if (left_ || getpid() != pid_) return;
    std::unique_lock<std::shared_mutex> alone(use_);
    if (left_) return;
    {
      const Exclusive exclusive(*this);
      if (exclusive.held()) expel(self_);
    }
    UCM_STEP("ring.leave.expelled");
    unlock_byte(fd(), self_);  // not expelled, we are dead from here on: others will do it
    UCM_STEP("ring.leave.unlocked");
    left_ = true;
    region_.detach();
  }

  // Closes the descriptor: after leave(), or in a forked child, which must not keep the parent's locks alive.
  void close_descriptor() { region_.close_descriptor(); }

  // Held during every call from outside: refuses after leave() and in a forked child, holds leave() off
  // meanwhile.
  class Use {
  public:
    explicit Use(const Ring &ring) : shared_(ring.use_, std::defer_lock) {
      if (getpid() != ring.pid_)
        throw RingClosed("the ring was opened by process " + std::to_string(ring.pid_) +
                         ": open it again after a fork");
      // Never waits, for the caller may hold the GIL: alone is only who leaves, and he says so before.
      while (!ring.closing_.load() && !shared_.try_lock()) {
      }
      if (ring.closing_.load()) throw RingClosed("the ring is closed");
    }

  private:
    std::shared_lock<std::shared_mutex> shared_;
  };

  // LOADING -> FAILED by the owner, waking all who wait, and gives the claim's reference back: the memory may
  // be reused from here on, so no write may be on its way. Results as for publish.
  void abort(const int32_t *slots, const uint32_t *versions, size_t count, uint8_t *done) {
    std::for_each(slots, slots + count, [this](int32_t slot) { checked(slot); });
    const Exclusive exclusive(*this);
    for (size_t i = 0; i < count; ++i) {
      const auto slot = static_cast<uint32_t>(slots[i]);
      done[i] = settle(slot, versions == nullptr ? nullptr : versions + i, SlotState::kFailed);
      if (done[i] == 0) continue;
      release(slots[i]);
      UCM_STEP("ring.abort.released");
      if (exclusive.held()) forget_failed(slot);  // else whoever looks for a victim does
    }
  }

  using Clock = std::chrono::steady_clock;

  // Sleeps until a slot that the caller has pinned leaves LOADING: Ready, Failed (aborted, or its owner died)
  // or Timeout.
  Outcome wait(int32_t slot, uint32_t version, Clock::time_point deadline) {
    std::atomic<uint64_t> &word = slot_[checked(slot)].word;
    for (;;) {
      Word seen{word.load(std::memory_order_acquire)};
      const Outcome now = outcome(seen, version);
      if (now != Outcome::kLoading) return now;
      const int64_t slice_ns = slice_until(deadline);
      if (slice_ns <= 0) return Outcome::kTimeout;
      const Word waiting{seen.bits | Word::kWaiting};
      if (!seen.waiting() && !word.compare_exchange_strong(seen.bits, waiting.bits)) continue;
      UCM_STEP("ring.wait.marked");
      if (futex_wait(word, waiting.low(), slice_ns)) reap_owner(slot);
    }
  }

  // As wait, for one shard: Ready as soon as that is full, and then whatever becomes of the others.
  Outcome wait_for_shard(int32_t slot, uint32_t version, uint32_t shard, Clock::time_point deadline) {
    const uint32_t place = checked(slot);
    for (;;) {
      const uint32_t seen = shards_.progress(place);  // before the looks: what comes after them ends the sleep
      const Word word = load(place);
      if (word.version() == version && shards_.has(place, version, shard)) return Outcome::kReady;
      const Outcome now = outcome(word, version);
      if (now != Outcome::kLoading) return now;
      const int64_t slice_ns = slice_until(deadline);
      if (slice_ns <= 0) return Outcome::kTimeout;
      UCM_STEP("ring.wait.looked");
      if (shards_.sleep(place, seen, slice_ns)) reap_owner(slot);
    }
  }

  // Claims `count` keys at once. READY and LOADING keys are pinned; each absent key gets a slot to fill (Owner,
  // one reference) or NoSpace, also when the structure cannot be changed now. Members of the batch, and the blocks
  // that they follow, are referenced meanwhile, so none is evicted for another. A key named twice is Owner, then
  // Loading at the same slot. With `terms.whole` all keys are claimed or none, and what was to go for them stays.
  void claim(const Key *keys, size_t count, Claim *claims, const Terms &terms = {}) {
    bool all_there = true;
    for (size_t i = 0; i < count; ++i) {
      claims[i] = pin(keys[i], terms.now_s);
      all_there &= claims[i].slot >= 0;
    }
    if (all_there) return;
    const Batch batch{keys, count, claims, terms};
    if (terms.whole) give_back(batch);  // else two who want the whole could hold each other up
    admit_alone(batch);
    take_memory_of(batch);
  }

  // Gives one reference back; what has expired goes with its last one.
  bool release(int32_t slot, uint32_t now_s = 0) {
    const bool done = RingSlots::release(slot);
    if (done && ttl_s() != 0 && is_expired({slot, load(slot)}, now_s)) free_if_expired(slot, now_s);
    return done;
  }

  // Empties the READY slots of those keys that nobody holds a reference to; `dropped` = 1 for them.
  void drop(const Key *keys, size_t count, uint8_t *dropped) {
    const Exclusive exclusive(*this);
    for (size_t i = 0; i < count; ++i) {
      const Found found = find(keys[i]);
      dropped[i] = exclusive.held() && found.slot >= 0 && free_if_idle(found.slot);
    }
  }

  RingStatistics statistics() {
    const Exclusive exclusive(*this);
    exclusive.require();
    return count();
  }

  // The first thing found wrong with the structure, in words; empty when all is well. Safe at any time.
  std::string check_integrity() {
    const Exclusive exclusive(*this);
    exclusive.require();
    return first_problem();
  }

private:
  static constexpr int64_t kSliceNs = 50'000'000;  // how long the death of an owner may go unnoticed

  static constexpr int64_t kPatienceNs = 2'000'000'000;  // longer than anybody who goes on holds the lock

  // The exclusive section: a mutex among our threads, then the OFD lock among processes. Not held when another
  // process has the lock and does not go on; who waited in vain once does not wait again until it was there.
  class Exclusive {
  public:
    explicit Exclusive(Ring &ring) : ring_(ring), threads_(ring.threads_) {
      held_ = lock_byte(ring.fd(), kExclusiveByte, ring.patient_ ? kPatienceNs : 0);
      ring.patient_ = held_;
      UCM_STEP("ring.lock.taken");
      if (held_ && ring.header_->dirty.exchange(1, std::memory_order_acq_rel) != 0) ring.repair();
    }
    ~Exclusive() {
      if (!held_) return;
      UCM_STEP("ring.lock.done");
      // After an exception the structure is as torn as after a death: whoever comes next repairs it.
      if (std::uncaught_exceptions() == exceptions_) ring_.header_->dirty.store(0, std::memory_order_release);
      UCM_STEP("ring.lock.clean");
      unlock_byte(ring_.fd(), kExclusiveByte);
    }
    bool held() const { return held_; }
    void require() const {
      if (!held_) throw RingStuck();
    }

  private:
    Ring &ring_;
    std::unique_lock<std::mutex> threads_;
    const int exceptions_ = std::uncaught_exceptions();
    bool held_ = false;
  };

  // What became of a stay as far as its word says: Loading while it is being filled, Failed when it is over.
  static Outcome outcome(Word now, uint32_t version) {
    if (now.version() != version) return Outcome::kFailed;
    if (now.state() == SlotState::kLoading) return Outcome::kLoading;
    // A pinned slot shows Closing for a moment when an evictor looks twice; it is READY.
    const bool ready = now.state() == SlotState::kReady || now.state() == SlotState::kClosing;
    return ready ? Outcome::kReady : Outcome::kFailed;
  }

  // How long to sleep before the next look at who is alive; not positive when the time is over.
  int64_t slice_until(Clock::time_point deadline) const {
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count();
    if (left > 0 && closing_.load(std::memory_order_relaxed)) throw RingClosed("the ring was closed during a wait");
    return std::min<int64_t>(left, kSliceNs);
  }

  // The claim proper; slots of ours may have no memory yet.
  void admit_alone(const Batch &batch) {
    const Exclusive exclusive(*this);
    UCM_STEP("ring.claim.begun");
    if (exclusive.held()) return admit(batch);
    for (size_t i = 0; i < batch.count; ++i)
      if (batch.claims[i].slot < 0) batch.claims[i].outcome = Outcome::kNoSpace;
  }

  // The slots that a claim owns get memory where they have none: not under the lock, for the kernel clears it
  // meanwhile. When there is none for one there is none for the rest.
  void take_memory_of(const Batch &batch) {
    std::vector<size_t> without;
    for (size_t i = 0; i < batch.count; ++i) {
      const Claim &claim = batch.claims[i];
      if (claim.outcome != Outcome::kOwner || has_memory(static_cast<uint32_t>(claim.slot))) continue;
      if (!without.empty() || take_memory(static_cast<uint32_t>(claim.slot)) != 0) without.push_back(i);
    }
    if (without.empty()) return;
    const Exclusive exclusive(*this);
    for (const size_t i : without) {
      refuse(static_cast<uint32_t>(batch.claims[i].slot), exclusive.held());
      batch.claims[i] = {-1, Outcome::kNoSpace, 0};
    }
    if (batch.terms.whole) give_up(batch, exclusive.held());
  }

  // A batch that wants the whole and did not get it: what it owns fails, what it references is released.
  void give_up(const Batch &batch, bool locked) {
    for (size_t i = 0; i < batch.count; ++i) {
      if (batch.claims[i].outcome != Outcome::kOwner) continue;
      settle(batch.claims[i].slot, nullptr, SlotState::kFailed);
      RingSlots::release(batch.claims[i].slot);
      if (locked) forget_failed(batch.claims[i].slot);
      batch.claims[i].slot = -1;
    }
    give_back(batch);
  }

  void free_if_expired(int32_t slot, uint32_t now_s) {
    const Exclusive exclusive(*this);
    if (exclusive.held() && is_expired({slot, load(slot)}, now_s)) header_->expired += free_if_idle(slot);
  }

  void join() {
    const Exclusive exclusive(*this);
    exclusive.require();
    reap_dead();
    for (uint32_t k = 0; k < kParticipants; ++k) {
      if ((header_->participants >> k & 1) != 0 || !try_lock_byte(fd(), k)) continue;
      self_ = k;
      UCM_STEP("ring.join.locked");
      header_->participants |= uint64_t{1} << k;
      header_->pids[k] = static_cast<uint64_t>(pid_);
      UCM_STEP("ring.join.done");
      return;
    }
    throw std::runtime_error("all " + std::to_string(kParticipants) + " participants of the ring are alive");
  }

  // Not exclusive: looks first, and again inside, where the entry may have a new, living holder.
  void reap_owner(int32_t slot) {
    const uint32_t owner = slot_[slot].owner.load(std::memory_order_relaxed);
    if (owner == self_ || byte_is_held(fd(), owner)) return;
    const Exclusive exclusive(*this);
    if (exclusive.held()) reap_dead();
  }

  const pid_t pid_;
  std::mutex threads_;
  bool patient_ = true;  // guarded by threads_
  mutable std::shared_mutex use_;
  std::atomic<bool> closing_{false};
  bool left_ = false;
};

}  // namespace ucm
