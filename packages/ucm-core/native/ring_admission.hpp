// How keys come into a ring: room is found for a batch, victims are chosen for it, or all stays as it was.
#pragma once

#include "ring_structure.hpp"

namespace ucm {

// Needs the exclusive lock, as RingStructure does.
class RingAdmission : public RingStructure {
public:
  // How a batch wants its slots.
  struct Terms {
    const Key *parents = nullptr;  // per key that of the block before it in its prefix; all zeros = none
    uint32_t now_s = 0;            // seconds of the shared clock; 0 = nothing expires
    bool whole = false;            // all keys or none
    bool demand = false;           // may use the reserve
  };

protected:
  struct Batch {
    const Key *keys;
    size_t count;
    Claim *claims;
    const Terms &terms;
  };

  using RingStructure::RingStructure;

  // Pins a resident key. A stay of the key that has failed or expired is emptied, so that the key can be tried
  // again now; a failed one that is still referenced leaves the index only.
  Claim pin_or_forget(const Key &key, uint32_t now_s) {
    const Claim claim = pin(key, now_s);
    if (claim.slot >= 0) return claim;
    const Found found = find(key);
    if (found.slot < 0 || free_if_idle(found.slot)) return {};
    if (found.word.state() == SlotState::kFailed) {
      index_.erase(key.tag(), found.slot);
      return {};
    }
    return {-1, Outcome::kNoSpace, 0};  // expired and still read
  }

  // Puts `key` into an EMPTY slot that this call has taken, as LOADING with one reference of ours. A key that
  // came earlier in the same batch is joined instead, and the slot goes back.
  Claim insert(const Key &key, uint32_t slot, uint32_t now_s) {
    const Claim twin = pin(key, now_s);
    if (twin.slot >= 0) {
      push_free(slot);
      return twin;
    }
    Slot &target = slot_[slot];
    target.write_key(key);
    target.owner.store(self_, std::memory_order_relaxed);
    target.used_s.store(0, std::memory_order_relaxed);
    target.deadline_s.store(0, std::memory_order_relaxed);
    target.parent = kNoSlot;
    shards_.reset(slot, load(slot).version());
    if (ttl_s() != 0 && now_s != 0) renew(slot, now_s);
    UCM_STEP("ring.claim.keyed");
    pins(slot, self_).fetch_add(1, std::memory_order_seq_cst);
    UCM_STEP("ring.claim.counted");
    move(slot, SlotState::kLoading);
    UCM_STEP("ring.claim.loading");
    index_.insert(key.tag(), slot);
    UCM_STEP("ring.claim.inserted");
    return {static_cast<int32_t>(slot), Outcome::kOwner, load(slot).version()};
  }

  // A new block joins the line, unless somebody follows it already.
  void line_up(uint32_t slot) {
    slot_[slot].stamp.store(header_->tick.fetch_add(2, std::memory_order_relaxed) + 2, std::memory_order_relaxed);
    if (!chains_.is_followed(slot)) line_.push_newest(slot);
    UCM_STEP("ring.claim.lined");
  }

  // Slots found for a batch. Victims are CLOSING (or FAILED) until it is certain that they go.
  struct Room {
    std::vector<uint32_t> slots, victims;
  };

  // The line as a policy sees it.
  struct Candidates {
    Line &line;
    RingAdmission &ring;
    uint64_t looks;  // two rounds

    bool look() { return line.length() > 0 && looks-- > 0; }
    bool may_go(uint32_t slot) const {
      const SlotState state = ring.load(slot).state();
      return (state == SlotState::kReady || state == SlotState::kFailed) && !ring.is_pinned(slot);
    }
    bool used(uint32_t slot) const { return ring.load(slot).accessed(); }
    uint32_t stamp(uint32_t slot) const { return ring.slot_[slot].stamp.load(std::memory_order_relaxed); }
    void forget(uint32_t slot) {
      ring.slot_[slot].word.fetch_and(~Word::kAccessed);
      line.note_forgotten(slot);
    }
  };

  // The next victim, closed and out of line and chain; kNoSlot when nothing may go. What failed goes first.
  uint32_t withdraw_victim() {
    Candidates candidates{line_, *this, 2 * static_cast<uint64_t>(line_.length())};
    uint32_t slot = line_.oldest();
    if (slot == kNoSlot || load(slot).state() != SlotState::kFailed || !close_if_idle(slot)) {
      do {
        slot = with_policy(header_->rules.policy, [&](auto policy) { return policy.victim(candidates); });
        if (slot == kNoSlot) return kNoSlot;
      } while (!close_if_idle(slot));
    }
    line_.remove(slot);
    chains_.unlist(slot);
    return slot;
  }

  // Appends slots for up to `count` keys in all: free ones, then what has expired, then victims of the policy. Who
  // may not use the reserve empties what of it comes in his way. A fruitless search ends it, so time is bounded.
  void find_room(size_t count, const Terms &terms, Room &room) {
    if (room.slots.size() + free_slots(terms.demand) < count) free_expired(terms.now_s);
    take_free(count, terms.demand, false, room);
    if (terms.whole) line_.remember();
    while (room.slots.size() < count) {
      const uint32_t slot = withdraw_victim();
      if (slot == kNoSlot) break;
      room.victims.push_back(slot);
      if (terms.demand || !is_reserved(slot)) room.slots.push_back(slot);
    }
    take_free(count, terms.demand, true, room);
  }

  void take_free(size_t count, bool demand, bool any, Room &room) {
    for (uint32_t slot; room.slots.size() < count && (slot = pop_free(demand, any)) != kNoSlot;)
      room.slots.push_back(slot);
  }

  // Everything as it was before find_room(): order, bits, deadlines, versions.
  void restore(Room &room) {
    line_.undo([this](uint32_t slot) { slot_[slot].word.fetch_or(Word::kAccessed); });
    for (const uint32_t slot : room.victims) {
      if (slot_[slot].parent != kNoSlot) chains_.list(slot);
      if (load(slot).state() == SlotState::kClosing) move(slot, SlotState::kReady);
      UCM_STEP("ring.evict.restored");
    }
    for (; !room.slots.empty(); room.slots.pop_back())
      if (load(room.slots.back()).state() == SlotState::kEmpty) push_free(room.slots.back());
    room.victims.clear();
  }

  // The victims go. What was found for the batch is EMPTY then, and on no free stack.
  void let_go(const Room &room, bool demand) {
    line_.forget();
    for (const uint32_t slot : room.victims) {
      header_->evictions += load(slot).state() == SlotState::kClosing;
      empty(slot);
      if (!demand && is_reserved(slot)) push_free(slot);
    }
  }

  // The slot of the block before key `i` of a batch, or -1.
  int32_t parent_of(const Batch &batch, size_t i) const {
    const Key &parent = batch.terms.parents[i];
    if (parent == Key{}) return -1;
    if (i > 0 && batch.claims[i - 1].slot >= 0 && parent == batch.keys[i - 1]) return batch.claims[i - 1].slot;
    const Found found = find(parent);
    return found.slot >= 0 && found.word.pinnable() ? found.slot : -1;
  }

  // Takes a reference on every block that a key of the batch follows, so that none is evicted for it.
  std::vector<int32_t> guard_parents(const Batch &batch) {
    std::vector<int32_t> guarded;
    for (size_t i = 0; batch.terms.parents != nullptr && i < batch.count; ++i) {
      const int32_t parent = parent_of(batch, i);
      if (parent < 0 || (i > 0 && parent == batch.claims[i - 1].slot)) continue;
      pins(parent, self_).fetch_add(1, std::memory_order_seq_cst);
      guarded.push_back(parent);
    }
    return guarded;
  }

  // Gives every absent key of a batch a slot, or NoSpace; with `whole` all of them or none. The keys that are
  // there are pinned.
  void admit(const Batch &batch) {
    std::vector<size_t> absent;
    bool possible = true;
    for (size_t i = 0; i < batch.count; ++i) {
      if (batch.claims[i].slot >= 0) continue;
      batch.claims[i] = pin_or_forget(batch.keys[i], batch.terms.now_s);
      possible &= batch.claims[i].outcome != Outcome::kNoSpace;
      if (batch.claims[i].outcome == Outcome::kAbsent) absent.push_back(i);
    }
    const std::vector<int32_t> guarded = guard_parents(batch);
    Room room;
    if (possible || !batch.terms.whole) find_room_for(absent.size(), batch.terms, room);
    if (batch.terms.whole && (!possible || room.slots.size() < absent.size())) {
      restore(room);
      give_back(batch);
    } else {
      let_go(room, batch.terms.demand);
      UCM_STEP("ring.claim.taken");
      fill(batch, absent, room);
    }
    for (const int32_t slot : guarded) release(slot);
  }

  // As find_room(); the dead are looked for when it was not enough.
  void find_room_for(size_t count, const Terms &terms, Room &room) {
    find_room(count, terms, room);
    if (room.slots.size() == count) return;
    if (terms.whole) restore(room);
    if (reap_dead() > 0) find_room(count, terms, room);
  }

  // Puts the absent keys into the slots, head first, and lines them up tail first.
  void fill(const Batch &batch, const std::vector<size_t> &absent, const Room &room) {
    for (size_t j = 0; j < absent.size(); ++j) {
      Claim &claim = batch.claims[absent[j]];
      claim.outcome = Outcome::kNoSpace;
      if (j < room.slots.size()) claim = insert(batch.keys[absent[j]], room.slots[j], batch.terms.now_s);
    }
    for (size_t i = 0; batch.terms.parents != nullptr && i < batch.count; ++i) {
      const int32_t slot = batch.claims[i].slot;
      const int32_t parent = slot < 0 || slot_[slot].parent != kNoSlot ? -1 : parent_of(batch, i);
      if (parent >= 0) chains_.attach(slot, parent);
    }
    UCM_STEP("ring.claim.linked");
    for (size_t j = absent.size(); j-- > 0;)
      if (batch.claims[absent[j]].outcome == Outcome::kOwner) line_up(batch.claims[absent[j]].slot);
  }

  // Takes every reference of a batch back: NoSpace for all of it.
  void give_back(const Batch &batch) {
    for (size_t i = 0; i < batch.count; ++i) {
      if (batch.claims[i].slot >= 0) release(batch.claims[i].slot);
      batch.claims[i] = {-1, Outcome::kNoSpace, 0};
    }
  }
};

}  // namespace ucm
