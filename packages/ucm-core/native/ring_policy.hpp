// Who goes when a ring needs room: the line of candidates, and the policies that choose from it.
//
// In the line stand the filled slots that no resident block follows, in the order in which they came: a prefix
// goes from its tail, under every policy. When nothing follows a block any more, it comes to the front.
// The line is derived from the slots; only the holder of the exclusive lock looks at it or changes it.
#pragma once

#include <algorithm>
#include <vector>

#include "ring_memory.hpp"

namespace ucm {

class Line {
public:
  Line(LineEnds &ends, Links *links) : ends_(ends), links_(links) {}

  bool has(uint32_t slot) const { return links_[slot].older != kOut; }
  uint32_t length() const { return ends_.length; }
  uint32_t oldest() const { return ends_.oldest; }
  uint32_t newer(uint32_t slot) const { return links_[slot].newer; }
  uint32_t older(uint32_t slot) const { return links_[slot].older; }
  // Where SIEVE looks next; kNoSlot = at the oldest.
  uint32_t hand() const { return ends_.hand; }
  void set_hand(uint32_t slot) { ends_.hand = slot; }

  void push_newest(uint32_t slot) { enter_behind(slot, ends_.newest); }
  void push_oldest(uint32_t slot) { enter_behind(slot, kNoSlot); }

  // Takes a slot out, if it is in.
  void remove(uint32_t slot) {
    if (!has(slot)) return;
    note({Change::kLeft, slot, links_[slot].older});
    take_out(slot);
  }
  void send_back(uint32_t slot) {
    remove(slot);
    push_newest(slot);
  }
  // Writes down that a slot's accessed bit was taken.
  void note_forgotten(uint32_t slot) { note({Change::kForgotten, slot, kNoSlot}); }

  void clear() { ends_ = {kNoSlot, kNoSlot, kNoSlot, 0}; }

  // From here on every change is written down, until forget() or undo().
  void remember() {
    remembers_ = true;
    hand_before_ = ends_.hand;
  }
  void forget() {
    remembers_ = false;
    changes_.clear();
  }
  // Puts the line back as it was at remember(); `give_bit_back(slot)` for every accessed bit that was taken.
  template <class GiveBitBack>
  void undo(GiveBitBack give_bit_back) {
    if (!remembers_) return;
    remembers_ = false;
    for (; !changes_.empty(); changes_.pop_back()) {
      const Change &last = changes_.back();
      if (last.kind == Change::kEntered) take_out(last.slot);
      if (last.kind == Change::kLeft) enter_behind(last.slot, last.older);
      if (last.kind == Change::kForgotten) give_bit_back(last.slot);
    }
    ends_.hand = hand_before_;
  }

private:
  struct Change {
    enum Kind { kEntered, kLeft, kForgotten } kind;
    uint32_t slot, older;
  };

  void note(Change change) {
    if (remembers_) changes_.push_back(change);
  }

  void enter_behind(uint32_t slot, uint32_t older) {
    note({Change::kEntered, slot, kNoSlot});
    const uint32_t newer = older == kNoSlot ? ends_.oldest : links_[older].newer;
    links_[slot].older = older;
    links_[slot].newer = newer;
    (older == kNoSlot ? ends_.oldest : links_[older].newer) = slot;
    (newer == kNoSlot ? ends_.newest : links_[newer].older) = slot;
    ++ends_.length;
  }

  void take_out(uint32_t slot) {
    const uint32_t older = links_[slot].older, newer = links_[slot].newer;
    (older == kNoSlot ? ends_.oldest : links_[older].newer) = newer;
    (newer == kNoSlot ? ends_.newest : links_[newer].older) = older;
    links_[slot].older = links_[slot].newer = kOut;
    if (ends_.hand == slot) ends_.hand = newer;
    --ends_.length;
  }

  LineEnds &ends_;
  Links *const links_;
  bool remembers_ = false;
  uint32_t hand_before_ = kNoSlot;
  std::vector<Change> changes_;
};

// The policies. Each says what a hit leaves at a slot (kMarks: the accessed bit, kStamps: the stamp; a hit is
// lock-free and writes at most one word) and who is next (`victim`: a slot that may go, or kNoSlot when the looks
// are used up; it stays in the line).
//
// `Candidates` shows them the line: `look()` counts a look and is false when there is none left, `may_go(slot)`
// = filled and nobody references it, `used(slot)` = its accessed bit, `forget(slot)` takes that bit.

// First in, first out. What may not go when its turn comes goes to the back.
struct Fifo {
  static constexpr bool kMarks = false, kStamps = false;

  template <class Candidates>
  static uint32_t victim(Candidates &candidates) {
    while (candidates.look()) {
      const uint32_t slot = candidates.line.oldest();
      if (candidates.may_go(slot)) return slot;
      candidates.line.send_back(slot);
    }
    return kNoSlot;
  }
};

// FIFO with a second chance: what was hit goes to the back once, without its bit.
struct Clock {
  static constexpr bool kMarks = true, kStamps = false;

  template <class Candidates>
  static uint32_t victim(Candidates &candidates) {
    while (candidates.look()) {
      const uint32_t slot = candidates.line.oldest();
      if (candidates.may_go(slot)) {
        if (!candidates.used(slot)) return slot;
        candidates.forget(slot);
      }
      candidates.line.send_back(slot);
    }
    return kNoSlot;
  }
};

// As CLOCK, but what was hit keeps its place and the hand passes on: new blocks are looked at soon (Zhang et al.,
// "SIEVE is simpler than LRU", NSDI 2024).
struct Sieve {
  static constexpr bool kMarks = true, kStamps = false;

  template <class Candidates>
  static uint32_t victim(Candidates &candidates) {
    Line &line = candidates.line;
    while (candidates.look()) {
      const uint32_t slot = line.hand() == kNoSlot ? line.oldest() : line.hand();
      line.set_hand(line.newer(slot));
      if (!candidates.may_go(slot)) continue;
      if (!candidates.used(slot)) return slot;
      candidates.forget(slot);
    }
    return kNoSlot;
  }
};

// Least recently used, sampled: of the next kSample that may go, the one whose stamp is oldest; the others go to
// the back.
struct Lru {
  static constexpr bool kMarks = false, kStamps = true;
  static constexpr uint32_t kSample = 8;

  template <class Candidates>
  static uint32_t victim(Candidates &candidates) {
    uint32_t best = kNoSlot, sampled = 0;
    for (uint32_t left = candidates.line.length(); left > 0 && sampled < kSample && candidates.look(); --left) {
      const uint32_t slot = candidates.line.oldest();
      candidates.line.send_back(slot);
      if (!candidates.may_go(slot)) continue;
      ++sampled;
      // Stamps wrap: the older one is the one from which the way to the other is the shorter one.
      if (best == kNoSlot || static_cast<int32_t>(candidates.stamp(slot) - candidates.stamp(best)) < 0) best = slot;
    }
    return best;
  }
};

// Calls `use` with the policy of this number.
template <class Use>
inline auto with_policy(Policy policy, Use use) {
  switch (policy) {
    case Policy::kFifo: return use(Fifo());
    case Policy::kLru: return use(Lru());
    case Policy::kSieve: return use(Sieve());
    default: return use(Clock());
  }
}

}  // namespace ucm
