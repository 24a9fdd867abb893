// What the holder of a ring's exclusive lock may do: give slots to keys, find victims, expel the dead, repair.
#pragma once

#include <chrono>
#include <cstring>
#include <vector>

#include "ring_slots.hpp"

namespace ucm {

struct RingStatistics {
  uint64_t empty = 0, loading = 0, ready = 0, failed = 0, pinned = 0;  // slots
  uint64_t own_references = 0;  // held by this participant, summed over slots
  uint64_t participants = 0, evictions = 0, reaped = 0, repairs = 0, refusals = 0;
  Policy policy = Policy::kClock;
};

// The structure of a ring. Everything here needs the exclusive lock, so nobody joins or leaves meanwhile.
class RingStructure : public RingSlots {
protected:
  RingStructure(int fd, uint32_t slots, uint64_t payload_bytes, uint32_t shards)
      : RingSlots(fd, slots, payload_bytes, shards), free_stack_(region_.at<uint32_t>(layout_.free_stack)) {}

  RingStatistics count() const {
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
    result.refusals = header_->refusals;
    result.policy = header_->rules.policy;
    return result;
  }

  // The first contradiction in words; empty when there is none.
  std::string first_problem() const {
    for (uint32_t slot = 0; slot < slots_; ++slot) {
      const char *problem = check_slot(slot);
      if (problem != nullptr) return "slot " + std::to_string(slot) + " " + problem;
    }
    return check_derived();
  }

  // True when any participant holds a reference.
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

  // Below all other free slots: there those gather that have no memory yet.
  void push_free_last(uint32_t slot) {
    std::memmove(free_stack_ + 1, free_stack_, header_->free_count * sizeof *free_stack_);
    free_stack_[0] = slot;
    ++header_->free_count;
  }

  // A free slot, or -1. While memory is short one that has some, unless `any` will do.
  int64_t pop_free(bool any) {
    const uint32_t count = header_->free_count;
    if (count == 0 || (!any && now_s() < header_->short_until_s && !has_memory(free_stack_[count - 1]))) return -1;
    return free_stack_[--header_->free_count];
  }

  // No memory was found for a slot that we own: the slot fails and goes to the end of the free ones, and for a
  // while blocks are evicted rather than memory asked for. Without the lock the next sweep frees it.
  void refuse(uint32_t slot, bool locked) {
    settle(slot, nullptr, SlotState::kFailed);
    release(static_cast<int32_t>(slot));
    if (!locked) return;
    if (empty_if_idle(slot)) push_free_last(slot);
    header_->short_until_s = now_s() + kShortS;
    ++header_->refusals;
  }

  static constexpr uint32_t kShortS = 2;

  // Second of the clock that all processes of a node share.
  static uint32_t now_s() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint32_t>(std::chrono::duration_cast<std::chrono::seconds>(now).count());
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

  // An EMPTY slot: a free one or a victim, or -1.
  int64_t take_slot() {
    const int64_t slot = pop_free(false);
    if (slot >= 0) return slot;
    const int64_t victim = sweep();
    return victim >= 0 ? victim : pop_free(true);
  }

  // Appends up to `count` EMPTY slots to `taken`: free ones first, then victims. The dead are looked for when
  // there is no other victim. One more fruitless sweep ends the whole batch, so the time is bounded.
  void allocate(size_t count, std::vector<uint32_t> &taken) {
    bool reaped = false;
    while (taken.size() < count) {
      const int64_t slot = take_slot();
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
    shards_.reset(slot, load(slot).version());
    UCM_STEP("ring.claim.keyed");
    pins(slot, self_).fetch_add(1, std::memory_order_seq_cst);
    UCM_STEP("ring.claim.counted");
    move(slot, SlotState::kLoading);
    UCM_STEP("ring.claim.loading");
    index_.insert(key.tag(), slot);
    UCM_STEP("ring.claim.inserted");
    return {static_cast<int32_t>(slot), Outcome::kOwner, load(slot).version()};
  }

  void initialise(const uint8_t *geometry_digest, RingRules rules) {
    std::memcpy(header_->magic, kRingMagic, sizeof kRingMagic);
    header_->version = kRingVersion;
    header_->rules = rules;
    header_->slots = slots_;
    header_->payload_bytes = payload_bytes_;
    header_->shards = shards();
    std::memcpy(header_->geometry_digest, geometry_digest, sizeof header_->geometry_digest);
    UCM_STEP("ring.create.headed");
    rebuild();
    UCM_STEP("ring.create.done");
  }

  // Makes participant k as if it had never come: its references are zero, its LOADING slots fail.
  void expel(uint32_t k) {
    for (uint32_t slot = 0; slot < slots_; ++slot) {
      pins(slot, k).store(0, std::memory_order_seq_cst);
      if (load(slot).state() == SlotState::kLoading && slot_[slot].owner.load(std::memory_order_relaxed) == k) {
        move(slot, SlotState::kFailed);
        UCM_STEP("ring.expel.failed");
        futex_wake_all(slot_[slot].word);
        shards_.tell(slot);
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
    for (const bool memory : {false, true})
      for (uint32_t slot = slots_; slot-- > 0;)  // the lowest number with memory ends on top of the stack
        if (load(slot).state() == SlotState::kEmpty && has_memory(slot) == memory) push_free(slot);
    for (uint32_t slot = 0; slot < slots_; ++slot)
      if (load(slot).pinnable()) index_.insert(slot_[slot].read_key().tag(), slot);
  }

  const char *check_slot(uint32_t slot) const {
    const Word word = load(slot);
    if (word.state() == SlotState::kClosing) return "is CLOSING outside an eviction";
    if (word.state() == SlotState::kReady && !has_memory(slot)) return "is READY without memory";
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

private:
  uint32_t *const free_stack_;
};

}  // namespace ucm
