// Which shards of a slot are full, and the word on which those sleep who wait for one.
#pragma once

#include <atomic>
#include <cstdint>

#include "ring_memory.hpp"

namespace ucm {

// Shared by all participants, in two arrays beside the slots. A slot has `words` words of version << 32 | one bit
// per shard: a bit counts only with the version of its stay, so neither a late writer nor a late reader ever sees
// another stay's bits. And it has a progress word: 2 x how often something changed, + 1 while somebody sleeps.
class ShardMap {
public:
  ShardMap(std::atomic<uint64_t> *bits, std::atomic<uint32_t> *progress, uint32_t shards)
      : bits_(bits), progress_(progress), shards_(shards) {}

  uint32_t shards() const { return shards_; }

  // No shard of the stay `version` is full. Exclusive, before anybody can meet that stay.
  void reset(uint32_t slot, uint32_t version) {
    for (uint32_t i = 0; i < shard_words(shards_); ++i) word(slot, i).store(empty(version), std::memory_order_relaxed);
  }

  // Shards [begin, end) of the stay `version` are full: releases what was written to them. False: the slot has
  // another stay, nothing more changes.
  bool set(uint32_t slot, uint32_t version, uint32_t begin, uint32_t end) {
    for (uint32_t i = begin / kBits; i * kBits < end; ++i) {
      uint64_t seen = word(slot, i).load(std::memory_order_relaxed);
      do {
        if (seen >> 32 != version) return false;
      } while (!word(slot, i).compare_exchange_weak(seen, seen | mask(i, begin, end)));
    }
    return true;
  }

  bool has(uint32_t slot, uint32_t version, uint32_t shard) const {
    return covers(slot, version, shard / kBits, mask(shard / kBits, shard, shard + 1));
  }

  bool full(uint32_t slot, uint32_t version) const {
    for (uint32_t i = 0; i < shard_words(shards_); ++i)
      if (!covers(slot, version, i, mask(i, 0, shards_))) return false;
    return true;
  }

  // To be read before a look at the slot: `sleep` ends at once when anything was told after that.
  uint32_t progress(uint32_t slot) const { return progress_[slot].load(); }

  // Something changed for those who wait: wakes them. After the change.
  void tell(uint32_t slot) {
    uint32_t seen = progress_[slot].load();
    while (!progress_[slot].compare_exchange_weak(seen, (seen & ~kSleeper) + 2)) {
    }
    if (seen & kSleeper) futex_wake_all(progress_[slot]);
  }

  // Sleeps until something is told that `seen` does not count, at most `slice_ns`. True when the slice ran out.
  bool sleep(uint32_t slot, uint32_t seen, int64_t slice_ns) {
    uint32_t now = seen;
    if (!(seen & kSleeper) && !progress_[slot].compare_exchange_strong(now, seen | kSleeper)) return false;
    return futex_wait(progress_[slot], seen | kSleeper, slice_ns);
  }

private:
  static constexpr uint32_t kBits = 32;
  static constexpr uint32_t kSleeper = 1;

  static uint64_t empty(uint32_t version) { return static_cast<uint64_t>(version) << 32; }

  // The bits of shards [begin, end) that stand in word i.
  static uint64_t mask(uint32_t i, uint32_t begin, uint32_t end) {
    const uint64_t first = begin > i * kBits ? begin - i * kBits : 0;
    const uint64_t last = end < (i + 1) * kBits ? end - i * kBits : kBits;
    return (uint64_t{1} << last) - (uint64_t{1} << first);
  }

  bool covers(uint32_t slot, uint32_t version, uint32_t i, uint64_t wanted) const {
    const uint64_t seen = word(slot, i).load();
    return seen >> 32 == version && (seen & wanted) == wanted;
  }

  std::atomic<uint64_t> &word(uint32_t slot, uint32_t i) const {
    return bits_[static_cast<uint64_t>(slot) * shard_words(shards_) + i];
  }

  std::atomic<uint64_t> *const bits_;
  std::atomic<uint32_t> *const progress_;
  const uint32_t shards_;
};

}  // namespace ucm
