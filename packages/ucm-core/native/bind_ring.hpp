// Python surface of the host ring: arrays in, fresh arrays out, the GIL released meanwhile.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "arguments.hpp"
#include "bind_copy.hpp"
#include "bind_header.hpp"
#include "bind_hold.hpp"
#include "object_format.hpp"
#include "ring_copy.hpp"

namespace ring_binding {

namespace nb = nanobind;
using namespace nb::literals;

template <class Value>
using Vector = nb::ndarray<const Value, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using KeyRows = nb::ndarray<const uint8_t, nb::shape<-1, 32>, nb::c_contig, nb::device::cpu>;
template <class Value>
using Array = nb::ndarray<nb::numpy, Value, nb::ndim<1>>;
using Claims = std::tuple<Array<int32_t>, Array<uint8_t>, Array<uint32_t>>;

using arguments::number;
using arguments::require;

// Memory for one result array, handed over to Python by give().
template <class Value>
class Output {
public:
  explicit Output(size_t size) : data_(new Value[size]), size_(size) {}
  Value &operator[](size_t i) { return data_[i]; }
  Value *data() { return data_.get(); }
  Array<Value> give() {
    nb::capsule owner(data_.get(), [](void *memory) noexcept { delete[] static_cast<Value *>(memory); });
    return Array<Value>(data_.release(), {size_}, owner);
  }

private:
  std::unique_ptr<Value[]> data_;
  size_t size_;
};

inline std::vector<ucm::Key> parse(const KeyRows &keys) {
  std::vector<ucm::Key> parsed(keys.shape(0));
  for (size_t i = 0; i < parsed.size(); ++i) parsed[i] = ucm::Key::from(keys.data() + 32 * i);
  return parsed;
}

// The keys of the blocks before them; of none where no parents are named.
inline std::vector<ucm::Key> parse(const KeyRows &keys, const std::optional<KeyRows> &parents) {
  if (!parents.has_value()) return {};
  require(parents->shape(0) == keys.shape(0),
          number(keys.shape(0)) + " keys and " + number(parents->shape(0)) + " parents");
  return parse(*parents);
}

// What every call shares: no GIL, and the ring neither closed nor closing.
struct Working {
  explicit Working(const ucm::Ring &ring) : use(ring) {}
  nb::gil_scoped_release released;
  ucm::Ring::Use use;
};

// What calls share that look at slots or move them, and wait for nothing. A short one keeps the GIL: to get it back behind
// a busy thread takes up to Python's switch interval, 5 ms, far longer than the call.
struct Glance {
  static constexpr size_t kShort = 4096;  // keys; below half a millisecond even when every slot is a cache miss

  Glance(const ucm::Ring &ring, size_t count) {
    if (count > kShort) released.emplace();
    use.emplace(ring);
  }
  std::optional<nb::gil_scoped_release> released;
  std::optional<ucm::Ring::Use> use;
};

// Calls `look(i, key)` for every key, a few at a time with their memory asked for beforehand.
template <class Look>
inline void for_each(const ucm::Ring &ring, const KeyRows &keys, Look look) {
  constexpr size_t kAtOnce = 32;
  ucm::Key some[kAtOnce];
  for (size_t begin = 0; begin < keys.shape(0); begin += kAtOnce) {
    const size_t count = std::min(kAtOnce, keys.shape(0) - begin);
    for (size_t i = 0; i < count; ++i) some[i] = ucm::Key::from(keys.data() + 32 * (begin + i));
    ring.prefetch(some, count);
    for (size_t i = 0; i < count; ++i) look(begin + i, some[i]);
  }
}

inline Claims unzip(const std::vector<ucm::Ring::Claim> &claims) {
  Output<int32_t> slots(claims.size());
  Output<uint8_t> outcomes(claims.size());
  Output<uint32_t> versions(claims.size());
  for (size_t i = 0; i < claims.size(); ++i) {
    slots[i] = claims[i].slot;
    outcomes[i] = static_cast<uint8_t>(claims[i].outcome);
    versions[i] = claims[i].version;
  }
  return {slots.give(), outcomes.give(), versions.give()};
}

inline Claims claim(ucm::Ring &ring, KeyRows keys, std::optional<KeyRows> parents, uint32_t now_s, bool whole,
                    bool demand, Hold *hold) {
  const std::vector<ucm::Key> parsed = parse(keys), before = parse(keys, parents);
  const ucm::Ring::Terms terms{parents.has_value() ? before.data() : nullptr, now_s, whole, demand};
  std::vector<ucm::Ring::Claim> claims(parsed.size());
  {
    Working working(ring);
    ring.claim(parsed.data(), parsed.size(), claims.data(), terms);
  }
  if (hold != nullptr) hold->note(claims, now_s, false);
  return unzip(claims);
}

inline bool scatter(ucm::Ring &ring, KeyRows keys, copy_binding::Strides strides, uint32_t now_s) {
  const ucm::Layouts layouts =
      copy_binding::parse(strides, keys.shape(0), static_cast<int64_t>(ring.payload_bytes()));
  const std::vector<ucm::Key> parsed = parse(keys);
  const Working working(ring);
  return ucm::scatter(ring, parsed.data(), parsed.size(), layouts, now_s);
}

inline Claims gather(ucm::Ring &ring, KeyRows keys, std::optional<KeyRows> parents, uint32_t now_s,
                     copy_binding::Strides strides, std::tuple<int64_t, int64_t> units, Hold *hold) {
  const auto bytes = static_cast<int64_t>(ring.payload_bytes());
  const ucm::Layouts layouts = copy_binding::parse(strides, keys.shape(0), bytes);
  const auto [count, unit_bytes] = units;
  require(count > 0 && bytes % count == 0 && unit_bytes >= 0 && unit_bytes <= bytes / count,
          number(count) + " units of " + number(unit_bytes) + " bytes do not fit a payload of " + number(bytes));
  const std::vector<ucm::Key> parsed = parse(keys), before = parse(keys, parents);
  std::vector<ucm::Ring::Claim> claims(parsed.size());
  {
    const Working working(ring);
    const ucm::Ring::Terms terms{parents.has_value() ? before.data() : nullptr, now_s, false, false};
    ucm::gather(ring, parsed.data(), parsed.size(), claims.data(), terms, layouts, {count, unit_bytes, bytes / count});
  }
  if (hold != nullptr) hold->note(claims, now_s, true);
  return unzip(claims);
}

inline Claims pin(ucm::Ring &ring, KeyRows keys, uint32_t now_s, Hold *hold) {
  std::vector<ucm::Ring::Claim> claims(keys.shape(0));
  {
    const Glance glance(ring, keys.shape(0));
    for_each(ring, keys, [&](size_t i, const ucm::Key &key) { claims[i] = ring.pin(key, now_s); });
  }
  if (hold != nullptr) hold->note(claims, now_s, false);
  return unzip(claims);
}

inline Array<uint8_t> lookup(const ucm::Ring &ring, KeyRows keys, uint32_t now_s) {
  Output<uint8_t> ready(keys.shape(0));
  {
    const Glance glance(ring, keys.shape(0));
    for_each(ring, keys, [&](size_t i, const ucm::Key &key) { ready[i] = ring.lookup(key, now_s); });
  }
  return ready.give();
}

inline Array<uint8_t> touch(ucm::Ring &ring, KeyRows keys, uint32_t now_s, uint32_t interval_s) {
  Output<uint8_t> found(keys.shape(0));
  {
    const Glance glance(ring, keys.shape(0));
    for_each(ring, keys, [&](size_t i, const ucm::Key &key) {
      found[i] = static_cast<uint8_t>(ring.touch(key, now_s, interval_s));
    });
  }
  return found.give();
}

inline std::tuple<Array<uint8_t>, Array<uint8_t>> residents(const ucm::Ring &ring) {
  std::vector<ucm::Key> keys;
  std::vector<uint8_t> referenced;
  {
    Working working(ring);
    ring.for_each_resident([&](const ucm::Key &key, bool is_referenced) {
      keys.push_back(key);
      referenced.push_back(is_referenced);
    });
  }
  Output<uint8_t> all_bytes(32 * keys.size()), all_referenced(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    std::memcpy(all_bytes.data() + 32 * i, &keys[i], 32);
    all_referenced[i] = referenced[i];
  }
  return {all_bytes.give(), all_referenced.give()};
}

inline Array<uint8_t> drop(ucm::Ring &ring, KeyRows keys) {
  const std::vector<ucm::Key> parsed = parse(keys);
  Output<uint8_t> dropped(parsed.size());
  {
    Working working(ring);
    ring.drop(parsed.data(), parsed.size(), dropped.data());
  }
  return dropped.give();
}

inline Array<uint8_t> release(ucm::Ring &ring, Vector<int32_t> slots, uint32_t now_s) {
  Output<uint8_t> done(slots.shape(0));
  const auto release_all = [&] {
    for (size_t i = 0; i < slots.shape(0); ++i) done[i] = ring.release(slots.data()[i], now_s);
  };
  if (ring.ttl_s() == 0) {
    const Glance glance(ring, slots.shape(0));
    release_all();
  } else {  // what has expired is emptied, under the exclusive lock
    const Working working(ring);
    release_all();
  }
  return done.give();
}

using Versions = std::optional<Vector<uint32_t>>;

inline const uint32_t *check(const Vector<int32_t> &slots, const Versions &versions) {
  if (!versions.has_value()) return nullptr;
  require(versions->shape(0) == slots.shape(0), number(slots.shape(0)) + " slots and " +
                                                    number(versions->shape(0)) + " versions");
  return versions->data();
}

inline Array<uint8_t> publish(ucm::Ring &ring, Vector<int32_t> slots, Versions versions) {
  const uint32_t *expected = check(slots, versions);
  Output<uint8_t> done(slots.shape(0));
  {
    const Glance glance(ring, slots.shape(0));
    for (size_t i = 0; i < slots.shape(0); ++i)
      done[i] = ring.publish(slots.data()[i], expected == nullptr ? nullptr : expected + i);
  }
  return done.give();
}

inline Array<uint8_t> abort(ucm::Ring &ring, Vector<int32_t> slots, Versions versions) {
  const uint32_t *expected = check(slots, versions);
  Output<uint8_t> done(slots.shape(0));
  {
    Working working(ring);
    ring.abort(slots.data(), expected, slots.shape(0), done.data());
  }
  return done.give();
}

inline void check_shards(const ucm::Ring &ring, int64_t begin, int64_t end) {
  if (begin < 0 || begin >= end || end > ring.shards())
    throw std::out_of_range("shards [" + number(begin) + ", " + number(end) + ") are not in [0, " +
                            number(ring.shards()) + ")");
}

inline Array<uint8_t> publish_shards(ucm::Ring &ring, Vector<int32_t> slots, Vector<uint32_t> versions,
                                     int64_t begin, int64_t end) {
  const uint32_t *expected = check(slots, versions);
  check_shards(ring, begin, end);
  Output<uint8_t> done(slots.shape(0));
  {
    Working working(ring);
    for (size_t i = 0; i < slots.shape(0); ++i)
      done[i] = ring.publish_shards(slots.data()[i], expected[i], static_cast<uint32_t>(begin),
                                    static_cast<uint32_t>(end));
  }
  return done.give();
}

inline Array<uint8_t> wait(ucm::Ring &ring, Vector<int32_t> slots, Vector<uint32_t> versions, double timeout_s,
                           std::optional<int64_t> shard) {
  const uint32_t *expected = check(slots, versions);
  if (shard.has_value()) check_shards(ring, *shard, *shard + 1);
  constexpr double longest_s = 1e9;  // three decades; keeps the sum below inside the clock's range
  const auto patience = std::chrono::duration<double>(timeout_s > 0 ? std::min(timeout_s, longest_s) : 0);  // NaN: 0
  const auto deadline = ucm::Ring::Clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(patience);
  Output<uint8_t> outcomes(slots.shape(0));
  {
    Working working(ring);
    for (size_t i = 0; i < slots.shape(0); ++i)
      outcomes[i] = static_cast<uint8_t>(
          shard.has_value()
              ? ring.wait_for_shard(slots.data()[i], expected[i], static_cast<uint32_t>(*shard), deadline)
              : ring.wait(slots.data()[i], expected[i], deadline));
  }
  return outcomes.give();
}

inline Array<int64_t> addresses(const ucm::Ring &ring, Vector<int32_t> slots) {
  Output<int64_t> result(slots.shape(0));
  {
    const Glance glance(ring, slots.shape(0));
    for (size_t i = 0; i < slots.shape(0); ++i)
      result[i] = reinterpret_cast<int64_t>(ring.address(slots.data()[i]));
  }
  return result.give();
}

inline nb::dict statistics(ucm::Ring &ring) {
  ucm::RingStatistics now;
  {
    Working working(ring);
    now = ring.statistics();
  }
  nb::dict result;
  const std::pair<const char *, uint64_t> fields[] = {
      {"empty", now.empty},           {"loading", now.loading},
      {"ready", now.ready},           {"failed", now.failed},
      {"pinned", now.pinned},         {"own_references", now.own_references},
      {"participants", now.participants}, {"evictions", now.evictions},
      {"expired", now.expired},
      {"reaped", now.reaped},         {"repairs", now.repairs},
      {"refusals", now.refusals},
      {"policy", static_cast<uint64_t>(now.policy)}};
  for (const auto &[name, value] : fields) result[name] = value;
  return result;
}

inline std::string check_integrity(ucm::Ring &ring) {
  Working working(ring);
  return ring.check_integrity();
}

inline void leave(ucm::Ring &ring) {
  nb::gil_scoped_release released;  // waits for calls of other threads, which may need the GIL to end
  ring.leave();
}

inline int take_all(ucm::Ring &ring) {
  Working working(ring);
  return ring.take_all();
}

inline bool ask_for_huge_pages(ucm::Ring &ring) {
  Working working(ring);
  return ring.ask_for_huge_pages();
}

inline void check_size(uint64_t slots, uint64_t payload_bytes, uint64_t shards) {
  require(slots > 0 && slots <= INT32_MAX, "slots " + number(slots) + " is not in [1, 2^31)");
  require(payload_bytes > 0 && payload_bytes % ucm::kRingPage == 0 && payload_bytes <= uint64_t{1} << 31,
          "payload_bytes " + number(payload_bytes) + " is not a positive multiple of 4096 up to 2^31");
  require(shards > 0 && shards <= ucm::kMaxShards,
          "shards " + number(shards) + " is not in [1, " + number(ucm::kMaxShards) + "]");
}

inline uint64_t ring_bytes(uint64_t slots, uint64_t payload_bytes, uint64_t shards) {
  check_size(slots, payload_bytes, shards);
  return ucm::RingLayout(static_cast<uint32_t>(slots), payload_bytes, static_cast<uint32_t>(shards)).total;
}

inline void construct(ucm::Ring *place, int fd, uint64_t slots, uint64_t payload_bytes,
                      const std::optional<nb::bytes> &geometry_digest, uint32_t policy, uint32_t ttl_s,
                      uint64_t shards) {
  check_size(slots, payload_bytes, shards);
  const uint8_t *digest = nullptr;
  if (geometry_digest.has_value()) {
    require(geometry_digest->size() == 32, "geometry_digest has " + number(geometry_digest->size()) +
                                               " bytes, not 32");
    digest = reinterpret_cast<const uint8_t *>(geometry_digest->c_str());
  }
  require(policy <= static_cast<uint32_t>(ucm::Policy::kSieve), "policy " + number(policy) + " is not in [0, 4)");
  const ucm::RingRules rules{static_cast<ucm::Policy>(policy), ttl_s};
  nb::gil_scoped_release released;
  new (place)
      ucm::Ring(fd, static_cast<uint32_t>(slots), payload_bytes, digest, rules, static_cast<uint32_t>(shards));
}

// The legal moves of kMoves: {(from, to): mover}, all by name.
inline nb::dict moves() {
  nb::dict legal;
  for (size_t from = 0; from < 5; ++from)
    for (size_t to = 0; to < 5; ++to)
      if (ucm::kMoves[from][to] != ucm::Mover::kNobody)
        legal[nb::make_tuple(ucm::kStateNames[from], ucm::kStateNames[to])] =
            ucm::kMoverNames[static_cast<size_t>(ucm::kMoves[from][to])];
  return legal;
}

inline void translate(const std::exception_ptr &pointer, void *) {
  try {
    std::rethrow_exception(pointer);
  } catch (const ucm::RingClosed &closed) {
    const nb::object type = nb::module_::import_("ucm_core.errors").attr("ClosedError");
    PyErr_SetString(type.ptr(), closed.what());
  } catch (const ucm::RingStuck &stuck) {
    const nb::object type = nb::module_::import_("ucm_core.errors").attr("StoreError");
    PyErr_SetString(type.ptr(), stuck.what());
  }
}

}  // namespace ring_binding

inline void bind_ring(nanobind::module_ &m) {
  using namespace ring_binding;
  nb::register_exception_translator(translate);
  m.attr("RING_MAGIC") = nb::bytes(ucm::kRingMagic, sizeof ucm::kRingMagic);
  m.attr("RING_VERSION") = ucm::kRingVersion;
  m.attr("RING_PARTICIPANTS") = ucm::kParticipants;
  m.attr("RING_LIFECYCLE_BYTE") = ucm::kLifecycleByte;
  m.attr("RING_MOVES") = moves();
  m.def("ring_bytes", &ring_bytes, "slots"_a, "payload_bytes"_a, "shards"_a = 1);
  m.def("ring_header", &ring_header, "fd"_a);
  nb::class_<ucm::Ring>(m, "Ring", nb::is_weak_referenceable())
      .def("__init__", &construct, "fd"_a, "slots"_a, "payload_bytes"_a, "geometry_digest"_a.none(), "policy"_a = 0,
           "ttl_s"_a = 0, "shards"_a = 1)
      .def_prop_ro("fd", &ucm::Ring::fd)
      .def_prop_ro("slots", &ucm::Ring::slots)
      .def_prop_ro("payload_bytes", &ucm::Ring::payload_bytes)
      .def_prop_ro("shards", &ucm::Ring::shards)
      .def_prop_ro("participant", &ucm::Ring::participant)
      .def_prop_ro("ttl_s", &ucm::Ring::ttl_s)
      .def("lookup", &lookup, "keys"_a.noconvert(), "now_s"_a = 0)
      .def("claim", &claim, "keys"_a.noconvert(), "parents"_a.noconvert().none() = nb::none(), "now_s"_a = 0,
           "whole"_a = false, "demand"_a = false, "hold"_a.none() = nb::none())
      .def("pin", &pin, "keys"_a.noconvert(), "now_s"_a = 0, "hold"_a.none() = nb::none())
      .def("scatter", &ring_binding::scatter, "keys"_a.noconvert(), "strides"_a.noconvert(), "now_s"_a = 0)
      .def("gather", &ring_binding::gather, "keys"_a.noconvert(), "parents"_a.noconvert().none(), "now_s"_a,
           "strides"_a.noconvert(), "units"_a, "hold"_a.none() = nb::none())
      .def("wait", &ring_binding::wait, "slots"_a.noconvert(), "versions"_a.noconvert(), "timeout_s"_a,
           "shard"_a = nb::none())
      .def("publish", &publish, "slots"_a.noconvert(), "versions"_a.noconvert().none() = nb::none())
      .def("publish_shards", &publish_shards, "slots"_a.noconvert(), "versions"_a.noconvert(), "begin"_a, "end"_a)
      .def("abort", &ring_binding::abort, "slots"_a.noconvert(), "versions"_a.noconvert().none() = nb::none())
      .def("release", &release, "slots"_a.noconvert(), "now_s"_a = 0)
      .def("touch", &touch, "keys"_a.noconvert(), "now_s"_a, "interval_s"_a)
      .def("drop", &drop, "keys"_a.noconvert())
      .def("residents", &residents)
      .def("addresses", &addresses, "slots"_a.noconvert())
      .def("take_all", &take_all)
      .def("ask_for_huge_pages", &ask_for_huge_pages)
      .def("statistics", &statistics)
      .def("check_integrity", &check_integrity)
      .def("leave", &leave)
      .def("close_descriptor", &ucm::Ring::close_descriptor);
  bind_hold(m);
}
