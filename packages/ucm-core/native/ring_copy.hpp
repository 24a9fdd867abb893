// Whole batches between engine memory and a ring: looked up, referenced, copied and let go of in one go.
#pragma once

#include <vector>

#include "copy.hpp"
#include "ring.hpp"

namespace ucm {

// A piece's `payload_index` is the number of its key in the batch.
using Layouts = std::vector<Layout>;

// How a payload is cut: `unit_bytes` of every `stride` are its own, the rest is padding.
struct Cut {
  std::int64_t units, unit_bytes, stride;
};

// References to the payloads of a batch that are all READY, given back at the end.
class PinnedBatch {
public:
  PinnedBatch(Ring &ring, const Key *keys, size_t count, uint32_t now_s) : ring_(ring), now_s_(now_s) {
    slots_.reserve(count);
    addresses_.reserve(count);
    for (size_t i = 0; i < count && whole_; ++i) take(keys[i]);
  }
  ~PinnedBatch() {
    for (const int32_t slot : slots_) ring_.release(slot, now_s_);
  }
  PinnedBatch(const PinnedBatch &) = delete;
  PinnedBatch &operator=(const PinnedBatch &) = delete;

  bool whole() const { return whole_; }
  const std::int64_t *addresses() const { return addresses_.data(); }

private:
  void take(const Key &key) {
    const Ring::Claim claim = ring_.pin(key, now_s_);
    whole_ = claim.outcome == Outcome::kReady;
    if (claim.slot < 0) return;
    slots_.push_back(claim.slot);
    addresses_.push_back(reinterpret_cast<std::int64_t>(ring_.address(claim.slot)));
  }

  Ring &ring_;
  const uint32_t now_s_;
  std::vector<int32_t> slots_;
  std::vector<std::int64_t> addresses_;
  bool whole_ = true;
};

// Copies the payloads of all `keys` to engine memory. False: one is not READY, and no byte was copied.
inline bool scatter(Ring &ring, const Key *keys, size_t count, const Layouts &layouts, uint32_t now_s) {
  const PinnedBatch batch(ring, keys, count, now_s);
  if (!batch.whole()) return false;
  for (const Layout &layout : layouts)
    copy_pieces<Direction::kScatter>(layout.parts, layout.part_count, layout.pieces, layout.piece_count,
                                     batch.addresses());
  return true;
}

// Claims `keys`, which are distinct, and fills and publishes the slots that are ours to fill: those are Owner
// still, and readable by everybody.
inline void gather(Ring &ring, const Key *keys, size_t count, Ring::Claim *claims, const Ring::Terms &terms,
                   const Layouts &layouts, const Cut &cut) {
  ring.claim(keys, count, claims, terms);
  std::vector<std::int64_t> addresses(count, 0), owned;
  for (size_t i = 0; i < count; ++i) {
    if (claims[i].outcome != Outcome::kOwner) continue;
    addresses[i] = reinterpret_cast<std::int64_t>(ring.address(claims[i].slot));
    owned.push_back(addresses[i]);
  }
  for (const Layout &layout : layouts)
    for (size_t n = 0; n < layout.piece_count; ++n)
      if (addresses[static_cast<size_t>(layout.pieces[n].payload_index)] != 0)
        copy_pieces<Direction::kGather>(layout.parts, layout.part_count, layout.pieces + n, 1, addresses.data());
  zero_padding(owned.data(), owned.size(), cut.units, cut.unit_bytes, cut.stride);
  for (size_t i = 0; i < count; ++i)
    if (claims[i].outcome == Outcome::kOwner) ring.publish(claims[i].slot, nullptr);
}

}  // namespace ucm
