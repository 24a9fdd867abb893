// References of a claim on their way to whoever gives them back: with their last owner they go back by themselves.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "arguments.hpp"
#include "ring.hpp"

namespace ring_binding {

namespace nb = nanobind;
using namespace nb::literals;

// The native call that takes references notes them here before it returns, so that none is lost when Python code is
// ended between any two of its steps (by a signal's handler that raises).  One thread at a time.
class Hold {
public:
  using Places = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

  explicit Hold(ucm::Ring &ring) : ring_(ring) {}
  ~Hold() { let_go(0); }
  Hold(const Hold &) = delete;
  Hold &operator=(const Hold &) = delete;

  // `filled`: what we own is full and published already.
  void note(const std::vector<ucm::Ring::Claim> &claims, uint32_t now_s, bool filled) {
    now_s_ = now_s;
    for (const ucm::Ring::Claim &claim : claims)
      held_.push_back({claim.slot, claim.slot >= 0 && claim.outcome == ucm::Outcome::kOwner && !filled});
  }

  void publish(const Places &places) {
    check(places);
    const nb::gil_scoped_release released;
    const ucm::Ring::Use use(ring_);
    for (size_t i = 0; i < places.shape(0); ++i) {
      Place &place = held_[places(i)];
      if (place.filling && ring_.publish(place.slot, nullptr)) place.filling = false;
    }
  }

  // These go back now: those that are not full unfilled.
  void abort(const Places &places, uint32_t now_s) {
    check(places);
    std::vector<Place> gone;
    for (size_t i = 0; i < places.shape(0); ++i) gone.push_back(std::exchange(held_[places(i)], Place{}));
    give_back(gone, now_s);
  }

  // These are another's from now on.
  void move_to(Hold &other, const Places &places) {
    check(places);
    other.now_s_ = now_s_;
    for (size_t i = 0; i < places.shape(0); ++i)
      other.held_.push_back(std::exchange(held_[places(i)], Place{}));
  }

  void let_go(uint32_t now_s) {
    std::vector<Place> gone;
    gone.swap(held_);
    give_back(gone, now_s);
  }

private:
  struct Place {
    int32_t slot = -1;
    bool filling = false;
  };

  void check(const Places &places) const {
    for (size_t i = 0; i < places.shape(0); ++i)
      if (places(i) < 0 || static_cast<size_t>(places(i)) >= held_.size())
        throw std::out_of_range("place " + arguments::number(places(i)) + " of " +
                                arguments::number(held_.size()) + " that are held");
  }

  void give_back(const std::vector<Place> &gone, uint32_t now_s) noexcept {
    const nb::gil_scoped_release released;
    try {
      const ucm::Ring::Use use(ring_);
      for (const Place &place : gone) {
        uint8_t aborted = 0;
        if (place.filling) ring_.abort(&place.slot, nullptr, 1, &aborted);
        if (place.slot >= 0 && aborted == 0) ring_.release(place.slot, std::max(now_s, now_s_));
      }
    } catch (const ucm::RingClosed &) {  // it took them back itself; or they are of the process that forked this one
    }
  }

  ucm::Ring &ring_;
  std::vector<Place> held_;
  uint32_t now_s_ = 0;
};

inline void bind_hold(nb::module_ &m) {
  nb::class_<Hold>(m, "Hold")
      .def(nb::init<ucm::Ring &>(), "ring"_a, nb::keep_alive<1, 2>())
      .def("publish", &Hold::publish, "places"_a.noconvert())
      .def("abort", &Hold::abort, "places"_a.noconvert(), "now_s"_a)
      .def("move_to", &Hold::move_to, "other"_a, "places"_a.noconvert())
      .def("let_go", &Hold::let_go, "now_s"_a);
}

}  // namespace ring_binding
