// Which resident block comes before which: a prefix is a path in a forest whose edges lead from a block to the
// one before it. A block that others follow is no candidate for eviction.
#pragma once

#include "ring_policy.hpp"

namespace ucm {

// The slot of the block before is written in the slot (`Slot::parent`, the truth); who follows a block is a list
// derived from it. Only the holder of the exclusive lock looks at either or changes them.
class Chains {
public:
  Chains(Slot *slots, Links *links, Line &line) : slots_(slots), links_(links), line_(line) {}

  bool is_followed(uint32_t slot) const { return links_[slot].first_child != kNoSlot; }
  bool is_listed(uint32_t slot) const { return links_[slot].previous_sibling != kOut; }

  // Makes `child`, which follows nobody yet, follow `parent`; nothing where that would close a circle.
  void attach(uint32_t child, uint32_t parent) {
    for (uint32_t before = parent; is_followed(child) && before != kNoSlot; before = slots_[before].parent)
      if (before == child) return;
    if (child == parent) return;
    slots_[child].parent = parent;
    list(child);
    line_.remove(parent);
  }

  // Takes `child` out of the list of its parent, which comes to the front of the line when it was the last one.
  // What stands in the slot stays.
  void unlist(uint32_t child) {
    if (!is_listed(child)) return;
    Links &links = links_[child];
    const uint32_t parent = slots_[child].parent;
    (links.previous_sibling == kNoSlot ? links_[parent].first_child : links_[links.previous_sibling].next_sibling) =
        links.next_sibling;
    if (links.next_sibling != kNoSlot) links_[links.next_sibling].previous_sibling = links.previous_sibling;
    links.previous_sibling = kOut;
    if (!is_followed(parent)) line_.push_oldest(parent);
  }

  // Undoes unlist(), but for the line.
  void list(uint32_t child) {
    uint32_t &first = links_[slots_[child].parent].first_child;
    links_[child].previous_sibling = kNoSlot;
    links_[child].next_sibling = first;
    if (first != kNoSlot) links_[first].previous_sibling = child;
    first = child;
  }

  // Makes a slot follow nobody, and nobody follow it.
  void cut(uint32_t slot) {
    unlist(slot);
    slots_[slot].parent = kNoSlot;
    while (is_followed(slot)) {
      const uint32_t child = links_[slot].first_child;
      links_[slot].first_child = links_[child].next_sibling;
      links_[child].previous_sibling = kOut;
      slots_[child].parent = kNoSlot;
    }
  }

private:
  Slot *const slots_;
  Links *const links_;
  Line &line_;
};

}  // namespace ucm
