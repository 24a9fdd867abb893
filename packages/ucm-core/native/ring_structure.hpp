// What the holder of a ring's exclusive lock may do: give slots to keys, find victims, expel the dead, repair.
#pragma once

#include <chrono>
#include <cstring>
#include <vector>

#include "ring_chains.hpp"
#include "ring_slots.hpp"

namespace ucm {

struct RingStatistics {
  uint64_t empty = 0, loading = 0, ready = 0, failed = 0, pinned = 0;  // slots
  uint64_t own_references = 0;  // held by this participant, summed over slots
  uint64_t participants = 0, evictions = 0, expired = 0, reaped = 0, repairs = 0, refusals = 0;
  Policy policy = Policy::kClock;
};

// The structure of a ring. Everything here needs the exclusive lock, so nobody joins or leaves meanwhile.
class RingStructure : public RingSlots {
protected:
  RingStructure(int fd, uint32_t slots, uint64_t payload_bytes, uint32_t shards)
      : RingSlots(fd, slots, payload_bytes, shards),
        free_stack_(region_.at<uint32_t>(layout_.free_stack)),
        links_(region_.at<Links>(layout_.links)),
        line_(header_->line, links_),
        chains_(slot_, links_, line_) {}

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
    result.expired = header_->expired;
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
      if (problem == nullptr) problem = check_place(slot);
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

  // READY without references -> CLOSING; FAILED without references stays. False: the slot may not be emptied now.
  bool close_if_idle(uint32_t slot) {
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
    return true;
  }

  // A closed slot -> EMPTY, out of everything derived, its version raised; on no free stack yet.
  void empty(uint32_t slot) {
    chains_.cut(slot);
    line_.remove(slot);
    UCM_STEP("ring.evict.unlinked");
    index_.erase(slot_[slot].read_key().tag(), slot);
    UCM_STEP("ring.evict.erased");
    move(slot, SlotState::kEmpty);
    UCM_STEP("ring.evict.empty");
  }

  bool free_if_idle(uint32_t slot) {
    const bool closed = close_if_idle(slot);
    if (closed) {
      empty(slot);
      push_free(slot);
    }
    return closed;
  }

  // The last slots serve demand loads only.
  uint32_t reserve() const { return slots_ / kReserveShare; }
  bool is_reserved(uint32_t slot) const { return slot >= slots_ - reserve(); }

  void push_free(uint32_t slot) {
    if (is_reserved(slot)) {
      free_stack_[slots_ - reserve() + header_->reserve_count++] = slot;
    } else {
      free_stack_[header_->free_count++] = slot;
    }
    UCM_STEP("ring.free.pushed");
  }

  uint32_t free_slots(bool demand) const { return header_->free_count + (demand ? header_->reserve_count : 0); }

  // Below all other free slots: there those gather that have no memory yet.
  void push_free_last(uint32_t slot) {
    uint32_t *const bottom = is_reserved(slot) ? free_stack_ + slots_ - reserve() : free_stack_;
    uint32_t &count = is_reserved(slot) ? header_->reserve_count : header_->free_count;
    std::memmove(bottom + 1, bottom, count++ * sizeof *bottom);
    *bottom = slot;
  }

  // A free slot, or kNoSlot. While memory is short one that has some, unless `any` will do.
  uint32_t pop_free(bool demand, bool any) {
    const bool short_now = !any && now_s() < header_->short_until_s;
    const auto pop = [&](const uint32_t *bottom, uint32_t &count) {
      const bool will_do = count > 0 && !(short_now && !has_memory(bottom[count - 1]));
      return will_do ? bottom[--count] : kNoSlot;
    };
    const uint32_t slot = pop(free_stack_, header_->free_count);
    if (slot != kNoSlot || !demand) return slot;
    return pop(free_stack_ + slots_ - reserve(), header_->reserve_count);
  }

  // A slot that has just failed is nobody's neighbour, and first in line.
  void isolate_failed(uint32_t slot) {
    chains_.cut(slot);
    line_.remove(slot);
    line_.push_oldest(slot);
  }

  // It is emptied as soon as nobody references it.
  void forget_failed(uint32_t slot) {
    isolate_failed(slot);
    free_if_idle(slot);
  }

  // No memory was found for a slot that we own: the slot fails and goes to the end of the free ones, and for a
  // while blocks are evicted rather than memory asked for. Without the lock whoever looks for a victim frees it.
  void refuse(uint32_t slot, bool locked) {
    settle(slot, nullptr, SlotState::kFailed);
    release(static_cast<int32_t>(slot));
    if (!locked) return;
    isolate_failed(slot);
    if (close_if_idle(slot)) {
      empty(slot);
      push_free_last(slot);
    }
    header_->short_until_s = now_s() + kShortS;
    ++header_->refusals;
  }

  static constexpr uint32_t kShortS = 2;

  // Second of the clock that all processes of a node share.
  static uint32_t now_s() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint32_t>(std::chrono::duration_cast<std::chrono::seconds>(now).count());
  }

  // Empties what has expired and is not referenced, once in each second.
  void free_expired(uint32_t now_s) {
    if (ttl_s() == 0 || header_->swept_s == now_s) return;
    header_->swept_s = now_s;
    for (uint32_t slot = 0; slot < slots_; ++slot)
      if (is_expired({static_cast<int32_t>(slot), load(slot)}, now_s)) header_->expired += free_if_idle(slot);
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
        forget_failed(slot);
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
    header_->free_count = header_->reserve_count = 0;
    line_.clear();
    for (const bool memory : {false, true})
      for (uint32_t slot = slots_; slot-- > 0;)  // the lowest number with memory ends on top of the stack
        if (load(slot).state() == SlotState::kEmpty && has_memory(slot) == memory) push_free(slot);
    std::vector<uint32_t> filled;
    for (uint32_t slot = 0; slot < slots_; ++slot) {
      links_[slot] = {kOut, kOut, kNoSlot, kNoSlot, kOut};
      if (load(slot).state() != SlotState::kEmpty) filled.push_back(slot);
      if (load(slot).pinnable()) index_.insert(slot_[slot].read_key().tag(), slot);
    }
    rebuild_order(filled);
  }

  // Chains from what stands in the slots, the line in the order of the stamps.
  void rebuild_order(std::vector<uint32_t> &filled) {
    for (const uint32_t slot : filled) {
      uint32_t &parent = slot_[slot].parent;
      if (parent != kNoSlot && !(load(slot).pinnable() && load(parent).pinnable())) parent = kNoSlot;
      if (parent != kNoSlot) chains_.list(slot);
    }
    const uint32_t tick = header_->tick.load(std::memory_order_relaxed);
    const auto age = [&](uint32_t slot) { return tick + 1 - slot_[slot].stamp.load(std::memory_order_relaxed); };
    std::sort(filled.begin(), filled.end(), [&](uint32_t one, uint32_t other) { return age(one) > age(other); });
    for (const uint32_t slot : filled)
      if (!chains_.is_followed(slot)) line_.push_newest(slot);
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

  const char *check_place(uint32_t slot) const {
    const bool filled = load(slot).state() != SlotState::kEmpty;
    if (line_.has(slot) != (filled && !chains_.is_followed(slot)))
      return "is a candidate although it is empty or followed, or is none although it could be";
    const uint32_t parent = filled ? slot_[slot].parent : kNoSlot;
    if (chains_.is_listed(slot) != (parent != kNoSlot)) return "follows a block that does not know it";
    if (parent != kNoSlot && (parent >= slots_ || load(parent).state() == SlotState::kEmpty))
      return "follows an empty slot";
    return nullptr;
  }

  std::string check_derived() const {
    uint64_t empty = 0, filled = 0;
    for (uint32_t slot = 0; slot < slots_; ++slot) {
      empty += load(slot).state() == SlotState::kEmpty;
      filled += load(slot).state() != SlotState::kEmpty && load(slot).state() != SlotState::kFailed;
    }
    const uint32_t begins[] = {0, slots_ - reserve()}, counts[] = {header_->free_count, header_->reserve_count};
    for (int stack = 0; stack < 2; ++stack)
      for (uint32_t i = begins[stack]; i < begins[stack] + counts[stack]; ++i) {
        if (load(free_stack_[i]).state() != SlotState::kEmpty) return "a slot on a free stack is in use";
        if (is_reserved(free_stack_[i]) != (stack == 1)) return "a slot is on the wrong free stack";
      }
    if (empty != counts[0] + counts[1]) return "an EMPTY slot is not on a free stack";
    const std::string problem = check_order();
    if (!problem.empty()) return problem;
    const auto is_filled = [this](uint32_t slot) { return slot < slots_ && load(slot).pinnable(); };
    return index_.count(is_filled) == filled ? "" : "the index has more entries than there are filled slots";
  }

  std::string check_order() const {
    uint64_t length = 0, followers = 0, listed = 0;
    for (uint32_t slot = line_.oldest(); slot != kNoSlot && length <= slots_; slot = line_.newer(slot)) {
      if (line_.newer(slot) != kNoSlot && line_.older(line_.newer(slot)) != slot) return "the line is torn";
      ++length;
    }
    if (length != line_.length()) return "the line is longer or shorter than it says";
    for (uint32_t slot = 0; slot < slots_; ++slot) {
      listed += chains_.is_listed(slot);
      for (uint32_t child = links_[slot].first_child; child != kNoSlot && followers <= slots_; ++followers) {
        if (slot_[child].parent != slot) return "a slot follows another block than the one that says so";
        child = links_[child].next_sibling;
      }
    }
    return followers == listed ? "" : "a slot follows a block that does not know it";
  }

  static constexpr uint32_t kReserveShare = 16;

  uint32_t *const free_stack_;
  Links *const links_;
  Line line_;
  Chains chains_;
};

}  // namespace ucm
