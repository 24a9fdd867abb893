// The index of a ring: which slot may hold a key. A hint, never the truth: whoever follows an entry compares
// the key that stands in the slot.
#pragma once

#include <atomic>
#include <cstdint>

#include "steps.hpp"

namespace ucm {

// Open addressing with linear probing over `words` (a power of two, at most half of them used) in shared
// memory. An entry is tag << 32 | (slot + 1), zero is unused. One writer at a time, any number of readers, none
// of them waits.
class RingIndex {
public:
  RingIndex(std::atomic<uint64_t> *entries, uint64_t words) : entries_(entries), mask_(words - 1) {}

  // The first slot under `tag` that `accepts(slot)`, or -1.
  template <class Accepts>
  int64_t find(uint32_t tag, Accepts accepts) const {
    uint64_t place = tag & mask_;
    for (uint64_t probes = 0; probes <= mask_; ++probes, place = next(place)) {
      const uint64_t seen = entries_[place].load(std::memory_order_acquire);
      if (seen == 0) break;
      if (tag_of(seen) == tag && accepts(slot_of(seen))) return slot_of(seen);
    }
    return -1;
  }

  // Asks the memory for the place where a search for `tag` begins.
  void prefetch(uint32_t tag) const { __builtin_prefetch(&entries_[tag & mask_]); }

  // The slot in the place where a search for `tag` begins, most often the one sought; -1 when it is unused.
  int64_t guess(uint32_t tag) const {
    const uint64_t seen = load(tag & mask_);
    return seen == 0 ? -1 : slot_of(seen);
  }

  void insert(uint32_t tag, uint32_t slot) {
    uint64_t place = tag & mask_;
    while (load(place) != 0) place = next(place);
    entries_[place].store(entry(tag, slot), std::memory_order_release);
  }

  // Removes one entry, if it is there, and pulls later ones of the run forward (each is copied before its old
  // place becomes the hole), so that no tombstones gather. A reader may miss an entry that moves past it: a
  // miss, no wrong hit.
  void erase(uint32_t tag, uint32_t slot) {
    uint64_t hole = tag & mask_;
    uint64_t seen;
    for (; (seen = load(hole)) != entry(tag, slot); hole = next(hole))
      if (seen == 0) return;
    for (uint64_t place = next(hole); (seen = load(place)) != 0; place = next(place)) {
      const uint64_t from_home = (place - tag_of(seen)) & mask_, from_hole = (place - hole) & mask_;
      if (from_home < from_hole) continue;  // its home lies behind the hole: there it would never be found
      entries_[hole].store(seen, std::memory_order_release);
      UCM_STEP("ring.index.shifted");
      hole = place;
    }
    entries_[hole].store(0, std::memory_order_release);
  }

  void clear() {
    for (uint64_t place = 0; place <= mask_; ++place) entries_[place].store(0, std::memory_order_relaxed);
  }

  // How many entries point at a slot that `counts(slot)`.
  template <class Counts>
  uint64_t count(Counts counts) const {
    uint64_t total = 0;
    for (uint64_t place = 0; place <= mask_; ++place) {
      const uint64_t seen = load(place);
      total += seen != 0 && counts(slot_of(seen));
    }
    return total;
  }

private:
  static uint64_t entry(uint32_t tag, uint32_t slot) { return static_cast<uint64_t>(tag) << 32 | (slot + 1); }
  static uint32_t tag_of(uint64_t entry) { return static_cast<uint32_t>(entry >> 32); }
  static uint32_t slot_of(uint64_t entry) { return static_cast<uint32_t>(entry) - 1; }
  uint64_t load(uint64_t place) const { return entries_[place].load(std::memory_order_relaxed); }
  uint64_t next(uint64_t place) const { return (place + 1) & mask_; }

  std::atomic<uint64_t> *entries_;
  uint64_t mask_;
};

}  // namespace ucm
