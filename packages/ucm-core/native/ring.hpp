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
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "ring_slots.hpp"

namespace ucm {

struct RingClosed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The exclusive lock is held by somebody who does not go on.
struct RingStuck : std::runtime_error {
  RingStuck() : std::runtime_error("the ring's lock is held by a process that does not go on") {}
};

struct RingStatistics {
  uint64_t empty = 0, loading = 0, ready = 0, failed = 0, pinned = 0;  // slots
  uint64_t own_references = 0;  // held by this participant, summed over slots
  uint64_t participants = 0, evictions = 0, reaped = 0, repairs = 0;
};

class Ring : public RingSlots {
public:
  // Maps the region behind `fd` and joins it. The caller holds the lifecycle lock and has made the file
  // RingLayout(slots, payload_bytes).total bytes long. `geometry_digest`: the file is all zeros and gets its
  // header here; null: slots and payload_bytes are those of the header. Throws std::system_error, or
  // std::runtime_error when all participants are taken by the living.
  Ring(int fd, uint32_t slots, uint64_t payload_bytes, const uint8_t *geometry_digest)
      : RingSlots(fd, slots, payload_bytes),
        pid_(getpid()),
        free_stack_(region_.at<uint32_t>(layout_.free_stack)) {
    if (geometry_digest != nullptr) initialise(geometry_digest);
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
      if (!ring.closing_.load()) shared_.lock();
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
      if (exclusive.held()) free_if_idle(slot);  // else the next sweep does
    }
  }

  using Clock = std::chrono::steady_clock;

  // Sleeps until a slot that the caller has pinned leaves LOADING: Ready, Failed (aborted, or its owner died)
  // or Timeout.
  Outcome wait(int32_t slot, uint32_t version, Clock::time_point deadline) {
    std::atomic<uint64_t> &word = slot_[checked(slot)].word;
    for (;;) {
      Word seen{word.load(std::memory_order_acquire)};
      if (seen.version() != version) return Outcome::kFailed;
      // A pinned slot shows Closing for a moment when an evictor looks twice; it is READY.
      if (seen.state() == SlotState::kReady || seen.state() == SlotState::kClosing) return Outcome::kReady;
      if (seen.state() != SlotState::kLoading) return Outcome::kFailed;
      const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count();
      if (left <= 0) return Outcome::kTimeout;
      if (closing_.load(std::memory_order_relaxed)) throw RingClosed("the ring was closed during a wait");
      const Word waiting{seen.bits | Word::kWaiting};
      if (!seen.waiting() && !word.compare_exchange_strong(seen.bits, waiting.bits)) continue;
      UCM_STEP("ring.wait.marked");
      if (futex_wait(word, waiting.low(), std::min<int64_t>(left, kSliceNs))) reap_owner(slot);
    }
  }

  // Claims `count` keys at once. READY and LOADING keys are pinned; each absent key gets a slot to fill (Owner,
  // one reference) or NoSpace, also when the structure cannot be changed now. Members of the batch are pinned
  // from the start, so none evicts another. Keys in order of a prefix get slots such that the hand meets the
  // tail first. A key named twice is Owner, then Loading at the same slot.
  void claim(const Key *keys, size_t count, Claim *claims) {
    std::vector<size_t> absent;
    std::vector<uint32_t> taken;
    absent.reserve(count);
    taken.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      claims[i] = pin(keys[i]);
      if (claims[i].slot < 0) absent.push_back(i);
    }
    if (absent.empty()) return;
    const Exclusive exclusive(*this);
    if (!exclusive.held()) {
      for (const size_t i : absent) claims[i].outcome = Outcome::kNoSpace;
      return;
    }
    const auto came_meanwhile = [&](size_t i) { return (claims[i] = pin_or_forget(keys[i])).slot >= 0; };
    absent.erase(std::remove_if(absent.begin(), absent.end(), came_meanwhile), absent.end());
    UCM_STEP("ring.claim.begun");
    allocate(absent.size(), taken);
    UCM_STEP("ring.claim.taken");
    for (size_t j = 0; j < absent.size(); ++j) {
      const size_t i = absent[j];
      claims[i].outcome = Outcome::kNoSpace;
      if (j < taken.size()) claims[i] = insert(keys[i], taken[taken.size() - 1 - j]);
    }
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
    RingStatistics result;
    uint64_t *const by_state[] = {&result.empty, &result.loading, &result.ready, &result.failed, &result.ready};
    for (uint32_t slot = 0; slot < slots_; ++slot) {
      ++*by_state[static_cast<int>(load(slot).state())];
      result.pinned += is_pinned(slot);
      result.own_references += pins(slot, self_).load(std::memory_order_relaxed);
    }
    result.participants = static_cast<uint64_t>(__builtin_popcountll(header_->participants));
    result.evictions = header_->evictions;
    result.reaped = header_->reaped;
    result.repairs = header_->repairs;
    return result;
  }

  // The first thing found wrong with the structure, in words; empty when all is well. Safe at any time.
  std::string check_integrity() {
    const Exclusive exclusive(*this);
    exclusive.require();
    for (uint32_t slot = 0; slot < slots_; ++slot) {
      const char *problem = check_slot(slot);
      if (problem != nullptr) return "slot " + std::to_string(slot) + " " + problem;
    }
    return check_derived();
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
      ring_.header_->dirty.store(0, std::memory_order_release);
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
    bool held_ = false;
  };

  // True when any participant holds a reference. Exclusive, as is all that follows: nobody joins or leaves
  // meanwhile.
  bool is_pinned(uint32_t slot) const {
    for (uint64_t left = header_->participants; left != 0; left &= left - 1) {
      const auto k = static_cast<uint32_t>(__builtin_ctzll(left));
      if (pins(slot, k).load(std::memory_order_seq_cst) != 0) return true;
    }
    return false;
  }

  // Moves a slot along one edge of kMoves, from whatever state it is in; throws when there is no such edge.
  // Flags that others set meanwhile survive where the state machine keeps them.
  void move(uint32_t slot, SlotState to) {
    Word seen = load(slot);
    while (!slot_[slot].word.compare_exchange_weak(seen.bits, seen.moved(to).bits)) {
    }
  }

  // READY or FAILED without references -> EMPTY, out of the index, its version raised. False: left as it was.
  bool empty_if_idle(uint32_t slot) {
    const SlotState state = load(slot).state();
    if ((state != SlotState::kReady && state != SlotState::kFailed) || is_pinned(slot)) return false;
    if (state == SlotState::kReady) {
      UCM_STEP("ring.evict.chosen");
      move(slot, SlotState::kClosing);
      UCM_STEP("ring.evict.closing");
      if (is_pinned(slot)) {  // somebody came between the first look and Closing
        move(slot, SlotState::kReady);
        return false;
      }
    }
    UCM_STEP("ring.evict.certain");
    index_.erase(slot_[slot].read_key().tag(), slot);
    UCM_STEP("ring.evict.erased");
    move(slot, SlotState::kEmpty);
    UCM_STEP("ring.evict.empty");
    return true;
  }

  void push_free(uint32_t slot) {
    free_stack_[header_->free_count++] = slot;
    UCM_STEP("ring.free.pushed");
  }

  bool free_if_idle(uint32_t slot) {
    const bool emptied = empty_if_idle(slot);
    if (emptied) push_free(slot);
    return emptied;
  }

  // Pins a resident key. A FAILED stay of the key is taken out of the index, so that the key can be tried again
  // now.
  Claim pin_or_forget(const Key &key) {
    const Claim claim = pin(key);
    if (claim.slot >= 0) return claim;
    const Found found = find(key);
    if (found.slot >= 0 && found.word.state() == SlotState::kFailed && !free_if_idle(found.slot))
      index_.erase(key.tag(), found.slot);
    return {};
  }

  // CLOCK: the next victim, emptied, or -1 after two rounds without one.
  int64_t sweep() {
    for (uint64_t step = 0; step < 2 * static_cast<uint64_t>(slots_); ++step) {
      const uint32_t slot = header_->hand;
      header_->hand = slot + 1 == slots_ ? 0 : slot + 1;
      const Word seen = load(slot);
      if (seen.state() == SlotState::kReady && seen.accessed()) {
        if (!is_pinned(slot)) slot_[slot].word.fetch_and(~Word::kAccessed);
      } else if (empty_if_idle(slot)) {
        header_->evictions += seen.state() == SlotState::kReady;
        return slot;
      }
    }
    return -1;
  }

  // Appends up to `count` EMPTY slots to `taken`: free ones first, then victims. The dead are looked for when
  // there is no other victim. One more fruitless sweep ends the whole batch, so the time is bounded.
  void allocate(size_t count, std::vector<uint32_t> &taken) {
    bool reaped = false;
    while (taken.size() < count) {
      const int64_t slot = header_->free_count > 0 ? free_stack_[--header_->free_count] : sweep();
      if (slot >= 0) {
        taken.push_back(static_cast<uint32_t>(slot));
      } else if (reaped || reap_dead() == 0) {
        return;
      } else {
        reaped = true;
      }
    }
  }

  // Puts `key` into an EMPTY slot that this call has taken, as LOADING with one reference of ours. A key that
  // came earlier in the same batch is joined instead, and the slot goes back.
  Claim insert(const Key &key, uint32_t slot) {
    const Claim twin = pin(key);
    if (twin.slot >= 0) {
      push_free(slot);
      return twin;
    }
    Slot &target = slot_[slot];
    target.write_key(key);
    target.owner.store(self_, std::memory_order_relaxed);
    target.used_s.store(0, std::memory_order_relaxed);
    UCM_STEP("ring.claim.keyed");
    pins(slot, self_).fetch_add(1, std::memory_order_seq_cst);
    UCM_STEP("ring.claim.counted");
    move(slot, SlotState::kLoading);
    UCM_STEP("ring.claim.loading");
    index_.insert(key.tag(), slot);
    UCM_STEP("ring.claim.inserted");
    return {static_cast<int32_t>(slot), Outcome::kOwner, load(slot).version()};
  }

  void initialise(const uint8_t *geometry_digest) {
    std::memcpy(header_->magic, kRingMagic, sizeof kRingMagic);
    header_->version = kRingVersion;
    header_->slots = slots_;
    header_->payload_bytes = payload_bytes_;
    std::memcpy(header_->geometry_digest, geometry_digest, sizeof header_->geometry_digest);
    UCM_STEP("ring.create.headed");
    rebuild();
    UCM_STEP("ring.create.done");
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

  // Makes participant k as if it had never come: its references are zero, its LOADING slots fail.
  void expel(uint32_t k) {
    for (uint32_t slot = 0; slot < slots_; ++slot) {
      pins(slot, k).store(0, std::memory_order_seq_cst);
      if (load(slot).state() == SlotState::kLoading && slot_[slot].owner.load(std::memory_order_relaxed) == k) {
        move(slot, SlotState::kFailed);
        UCM_STEP("ring.expel.failed");
        futex_wake_all(slot_[slot].word);
        free_if_idle(slot);
      }
    }
    UCM_STEP("ring.expel.cleared");
    header_->participants &= ~(uint64_t{1} << k);
    header_->pids[k] = 0;
    UCM_STEP("ring.expel.done");
  }

  // Expels every participant whose lock byte nobody holds. Returns how many.
  uint32_t reap_dead() {
    uint32_t dead = 0;
    for (uint64_t left = header_->participants; left != 0; left &= left - 1) {
      const auto k = static_cast<uint32_t>(__builtin_ctzll(left));
      if (k == self_ || byte_is_held(fd(), k)) continue;
      expel(k);
      ++dead;
    }
    header_->reaped += dead;
    return dead;
  }

  // Not exclusive: looks first, and again inside, where the entry may have a new, living holder.
  void reap_owner(int32_t slot) {
    const uint32_t owner = slot_[slot].owner.load(std::memory_order_relaxed);
    if (owner == self_ || byte_is_held(fd(), owner)) return;
    const Exclusive exclusive(*this);
    if (exclusive.held()) reap_dead();
  }

  // After a death in the exclusive section: undoes what the slots show half done, then derives the rest anew.
  void repair() {
    ++header_->repairs;
    UCM_STEP("ring.repair.begun");
    for (uint32_t slot = 0; slot < slots_; ++slot)
      if (load(slot).state() == SlotState::kClosing) move(slot, SlotState::kReady);
    UCM_STEP("ring.repair.undone");
    rebuild();
    UCM_STEP("ring.repair.rebuilt");
    reap_dead();
  }

  void rebuild() {
    index_.clear();
    UCM_STEP("ring.rebuild.cleared");
    header_->free_count = 0;
    for (uint32_t slot = slots_; slot-- > 0;) {  // the lowest number ends on top of the stack
      const Word word = load(slot);
      if (word.state() == SlotState::kEmpty) push_free(slot);
      if (word.pinnable()) index_.insert(slot_[slot].read_key().tag(), slot);
    }
  }

  const char *check_slot(uint32_t slot) const {
    const Word word = load(slot);
    if (word.state() == SlotState::kClosing) return "is CLOSING outside an eviction";
    if (word.pinnable() && find(slot_[slot].read_key()).slot != static_cast<int32_t>(slot))
      return "holds a key that the index does not find there";
    const uint32_t owner = slot_[slot].owner.load(std::memory_order_relaxed);
    if (word.state() == SlotState::kLoading && (header_->participants >> owner & 1) == 0)
      return "is LOADING without an owner";
    for (uint32_t k = 0; k < kParticipants; ++k)
      if ((header_->participants >> k & 1) == 0 && pins(slot, k).load() != 0) return "is referenced by nobody";
    return nullptr;
  }

  std::string check_derived() const {
    uint64_t empty = 0, filled = 0;
    for (uint32_t slot = 0; slot < slots_; ++slot) {
      empty += load(slot).state() == SlotState::kEmpty;
      filled += load(slot).state() != SlotState::kEmpty && load(slot).state() != SlotState::kFailed;
    }
    for (uint32_t i = 0; i < header_->free_count; ++i)
      if (load(free_stack_[i]).state() != SlotState::kEmpty) return "a slot on the free stack is in use";
    if (empty != header_->free_count) return "an EMPTY slot is not on the free stack";
    const auto is_filled = [this](uint32_t slot) { return slot < slots_ && load(slot).pinnable(); };
    return index_.count(is_filled) == filled ? "" : "the index has more entries than there are filled slots";
  }

  const pid_t pid_;
  uint32_t *const free_stack_;
  std::mutex threads_;
  bool patient_ = true;  // guarded by threads_
  mutable std::shared_mutex use_;
  std::atomic<bool> closing_{false};
  bool left_ = false;
};

}  // namespace ucm
