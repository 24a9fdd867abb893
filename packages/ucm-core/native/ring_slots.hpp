// One participant's view of the slots: what happens per block, all of it lock-free. See ring.hpp for the memory
// order.
#pragma once

#include "ring_index.hpp"
#include "ring_policy.hpp"
#include "ring_shards.hpp"

namespace ucm {

// What became of one key of a claim, a pin or a wait. The numbers are part of the Python API.
enum class Outcome : uint8_t { kOwner, kReady, kLoading, kNoSpace, kFailed, kTimeout, kAbsent };

// What a touch found: the key is not resident, was touched lately, or is due. Part of the Python API.
enum class Touch : uint8_t { kAbsent, kKnown, kDue };

// The slots of a mapped region. Not used by itself: a Ring joins as a participant.
class RingSlots {
public:
  struct Claim {
    int32_t slot = -1;
    Outcome outcome = Outcome::kAbsent;
    uint32_t version = 0;
  };

  RingSlots(const RingSlots &) = delete;
  RingSlots &operator=(const RingSlots &) = delete;

  int fd() const { return region_.fd(); }
  uint32_t slots() const { return slots_; }
  uint64_t payload_bytes() const { return payload_bytes_; }
  uint32_t shards() const { return shards_.shards(); }
  uint32_t participant() const { return self_; }
  uint32_t ttl_s() const { return header_->rules.ttl_s; }

  // Address of a slot's payload in this process: to read while pinned, to write while its owner.
  uint8_t *address(int32_t slot) const {
    return region_.at<uint8_t>(layout_.payload + checked(slot) * payload_bytes_);
  }

  // True when `key` is READY now. Takes nothing: the block may be gone the next moment. A false "no" is
  // possible while the structure changes, a false "yes" is not. `now_s`, here and below: seconds of a clock that
  // all processes share; what has expired by then is absent. 0 = nothing expires.
  bool lookup(const Key &key, uint32_t now_s = 0) const {
    const Found found = find(key);
    if (found.slot < 0 || found.word.state() != SlotState::kReady || is_expired(found, now_s)) return false;
    const Word again = load(found.slot);
    return again.version() == found.word.version() && again.state() == SlotState::kReady;
  }

  // Asks the memory for what a look at `keys` will read, so that the looks need not wait one after the other.
  void prefetch(const Key *keys, size_t count) const {
    for (size_t i = 0; i < count; ++i) index_.prefetch(keys[i].tag());
    for (size_t i = 0; i < count; ++i) {
      const int64_t slot = index_.guess(keys[i].tag());
      if (slot >= 0 && static_cast<uint64_t>(slot) < slots_) __builtin_prefetch(&slot_[slot]);
    }
  }

  // Takes one reference on the slot that holds `key` (READY or LOADING) and marks it as used, or Absent.
  Claim pin(const Key &key, uint32_t now_s = 0) {
    const Found found = find(key);
    if (found.slot < 0 || !found.word.pinnable() || is_expired(found, now_s)) return {};
    UCM_STEP("ring.pin.found");
    pins(found.slot, self_).fetch_add(1, std::memory_order_seq_cst);
    UCM_STEP("ring.pin.counted");
    const Word now{slot_[found.slot].word.load(std::memory_order_seq_cst)};
    if (now.version() != found.word.version() || !now.pinnable()) {  // evicted, failed or reused in between
      pins(found.slot, self_).fetch_sub(1, std::memory_order_release);
      return {};
    }
    mark_used(found.slot, now, now_s);
    UCM_STEP("ring.pin.done");
    const bool ready = now.state() == SlotState::kReady;
    return {found.slot, ready ? Outcome::kReady : Outcome::kLoading, now.version()};
  }

  // Gives one reference of this participant back. False when it holds none there: nothing changes then.
  bool release(int32_t slot) {
    std::atomic<uint32_t> &count = pins(checked(slot), self_);
    uint32_t held = count.load(std::memory_order_relaxed);
    while (held != 0 && !count.compare_exchange_weak(held, held - 1, std::memory_order_release)) {
    }
    UCM_STEP("ring.release.done");
    return held != 0;
  }

  // Marks a resident key as used; takes no reference. Due for the first caller of all processes in
  // `interval_s`, counted from its stamp to `now_s`, seconds of a clock that they share.
  Touch touch(const Key &key, uint32_t now_s, uint32_t interval_s) {
    const Found found = find(key);
    if (found.slot < 0 || is_expired(found, now_s)) return Touch::kAbsent;
    mark_used(found.slot, found.word, now_s);
    std::atomic<uint32_t> &stamp = slot_[found.slot].used_s;
    uint32_t last = stamp.load(std::memory_order_relaxed);
    const bool due = last == 0 || now_s - last >= interval_s;
    UCM_STEP("ring.touch.marked");
    return due && stamp.compare_exchange_strong(last, now_s, std::memory_order_relaxed) ? Touch::kDue : Touch::kKnown;
  }

  // Calls `tell(key, referenced)` for every key that a slot holds or is being filled with, and says whether any
  // participant holds a reference to it. Takes nothing, so each answer is of its own moment; the references of
  // one that died count until somebody notices.
  template <class Tell>
  void for_each_resident(Tell tell) const {
    for (uint32_t slot = 0; slot < slots_; ++slot) {
      const Word word = load(slot);
      if (word.state() == SlotState::kEmpty || word.state() == SlotState::kFailed) continue;
      const Key key = slot_[slot].read_key();
      bool referenced = false;
      for (uint32_t k = 0; k < kParticipants && !referenced; ++k)
        referenced = pins(slot, k).load(std::memory_order_relaxed) != 0;
      if (load(slot).version() == word.version()) tell(key, referenced);
    }
  }

  // LOADING -> READY by the owner, waking all who wait. `version` from the claim stops a late writer; null
  // accepts the present stay. False, and nothing changes, unless this participant owns a LOADING slot of that
  // version. The reference of the claim stays until release().
  bool publish(int32_t slot, const uint32_t *version) {
    return settle(checked(slot), version, SlotState::kReady);
  }

  // Shards [begin, end) of a LOADING slot are full, by its owner: wakes all who wait for one of them. The last
  // shard makes the slot READY. False as for publish.
  bool publish_shards(int32_t slot, uint32_t version, uint32_t begin, uint32_t end) {
    const uint32_t place = checked(slot);
    const Word seen = load(place);
    const bool ours = slot_[place].owner.load(std::memory_order_relaxed) == self_ && seen.version() == version;
    if (!ours || seen.state() != SlotState::kLoading) return false;
    if (!shards_.set(place, version, begin, end)) return false;
    UCM_STEP("ring.shards.set");
    if (shards_.full(place, version)) {
      settle(place, &version, SlotState::kReady);
    } else {
      shards_.tell(place);
    }
    UCM_STEP("ring.shards.told");
    return true;
  }

  // Takes the memory of all slots and maps it here. 0 or an errno.
  int take_all() {
    for (uint32_t slot = 0; slot < slots_; ++slot)
      if (const int error = take_memory(slot)) return error;
    region_.map_pages(layout_.payload, slots_ * payload_bytes_);
    return 0;
  }

  // For all payloads of this process. False: the kernel knows none.
  bool ask_for_huge_pages() { return region_.ask_for_huge_pages(layout_.payload); }

  // True when somebody waits for a LOADING slot to be filled.
  bool has_sleeper(int32_t slot) const { return load(checked(slot)).waiting(); }

protected:
  // Maps the region behind `fd`, which is RingLayout(slots, payload_bytes, shards).total bytes long.
  RingSlots(int fd, uint32_t slots, uint64_t payload_bytes, uint32_t shards)
      : layout_(slots, payload_bytes, shards),
        slots_(slots),
        payload_bytes_(payload_bytes),
        region_(fd, layout_.total),
        header_(region_.at<Header>(0)),
        index_(region_.at<std::atomic<uint64_t>>(layout_.index), layout_.index_words),
        slot_(region_.at<Slot>(layout_.slot)),
        pins_(region_.at<std::atomic<uint32_t>>(layout_.pins)),
        backed_(region_.at<std::atomic<uint32_t>>(layout_.backed)),
        shards_(region_.at<std::atomic<uint64_t>>(layout_.bits),
                region_.at<std::atomic<uint32_t>>(layout_.progress), shards) {}

  struct Found {
    int32_t slot = -1;
    Word word;
  };

  Word load(uint32_t slot) const { return Word{slot_[slot].word.load(std::memory_order_acquire)}; }

  std::atomic<uint32_t> &pins(uint32_t slot, uint32_t participant) const {
    return pins_[static_cast<uint64_t>(slot) * kParticipants + participant];
  }

  uint32_t checked(int32_t slot) const {
    if (slot < 0 || static_cast<uint32_t>(slot) >= slots_)
      throw std::out_of_range("slot " + std::to_string(slot) + " is not in [0, " + std::to_string(slots_) + ")");
    return static_cast<uint32_t>(slot);
  }

  // The slot that holds `key`, in any state but Empty and Closing, and its word as it was when the key was
  // compared.
  Found find(const Key &key) const {
    Word word;
    const int64_t slot = index_.find(key.tag(), [&](uint32_t candidate) {
      if (candidate >= slots_) return false;
      word = load(candidate);
      const bool filled = word.state() != SlotState::kEmpty && word.state() != SlotState::kClosing;
      return filled && slot_[candidate].holds(key);
    });
    return {static_cast<int32_t>(slot), word};
  }

  // False for what is still being filled: its time has not begun.
  bool is_expired(const Found &found, uint32_t now_s) const {
    if (ttl_s() == 0 || found.word.state() != SlotState::kReady) return false;
    const uint32_t deadline_s = slot_[found.slot].deadline_s.load(std::memory_order_relaxed);
    return deadline_s != 0 && now_s >= deadline_s;
  }

  // Whatever a hit leaves. A race with a new stay of the slot makes that one look used.
  void mark_used(uint32_t slot, Word seen, uint32_t now_s) {
    with_policy(header_->rules.policy, [&](auto policy) {
      if (policy.kMarks) mark_accessed(slot, seen);
      if (policy.kStamps) stamp(slot);
    });
    if (ttl_s() != 0 && now_s != 0) renew(slot, now_s);
  }

  // Later than all that came before, earlier than all that will come.
  void stamp(uint32_t slot) {
    slot_[slot].stamp.store(header_->tick.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  void renew(uint32_t slot, uint32_t now_s) {
    const uint64_t deadline_s = static_cast<uint64_t>(now_s) + ttl_s();
    const uint64_t last_s = UINT32_MAX;
    slot_[slot].deadline_s.store(static_cast<uint32_t>(std::min(deadline_s, last_s)), std::memory_order_relaxed);
  }

  void mark_accessed(uint32_t slot, Word seen) {
    const uint32_t version = seen.version();
    while (!seen.accessed() && seen.version() == version && seen.pinnable())
      if (slot_[slot].word.compare_exchange_weak(seen.bits, seen.bits | Word::kAccessed)) return;
  }

  bool has_memory(uint32_t slot) const { return backed_[slot].load(std::memory_order_relaxed) != 0; }

  // Gives the payload of a slot memory of its own, once for the life of the region. Whoever dies in the middle
  // leaves it to the next. 0 or an errno.
  int take_memory(uint32_t slot) {
    if (has_memory(slot)) return 0;
    const int error = region_.take(layout_.payload + slot * payload_bytes_, payload_bytes_);
    UCM_STEP("ring.memory.taken");
    if (error != 0) return error;
    backed_[slot].store(1, std::memory_order_relaxed);
    region_.map_pages(layout_.payload + slot * payload_bytes_, payload_bytes_);  // cheaper than page by page
    return 0;
  }

  bool settle(uint32_t slot, const uint32_t *version, SlotState to) {
    Slot &target = slot_[slot];
    Word seen = load(slot);
    while (seen.state() == SlotState::kLoading && target.owner.load(std::memory_order_relaxed) == self_ &&
           (version == nullptr || *version == seen.version())) {
      UCM_STEP(to == SlotState::kReady ? "ring.publish.filled" : "ring.abort.begun");
      if (!target.word.compare_exchange_weak(seen.bits, seen.moved(to).bits)) continue;
      UCM_STEP(to == SlotState::kReady ? "ring.publish.moved" : "ring.abort.moved");
      if (seen.waiting()) futex_wake_all(target.word);
      shards_.tell(slot);
      return true;
    }
    return false;
  }

  const RingLayout layout_;
  const uint32_t slots_;
  const uint64_t payload_bytes_;
  Region region_;
  Header *const header_;
  RingIndex index_;
  Slot *const slot_;
  std::atomic<uint32_t> *const pins_;
  std::atomic<uint32_t> *const backed_;
  ShardMap shards_;
  uint32_t self_ = kParticipants;  // our number as a participant, once joined
};

}  // namespace ucm
