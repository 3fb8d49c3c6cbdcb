// One short message to each other rank.
#include "comm/farewell.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <string>

#include "base/error.h"
#include "base/hash.h"
#include "control/control.h"

namespace hpcomm {

namespace {

// What a rank sent before it left without a word may still be on its way for this long.
constexpr auto kOnItsWay = std::chrono::seconds(2);

}  // namespace

Farewell::Farewell(const Communicator& communicator)
    : communicator_(communicator), channel_(Fingerprint().add(communicator.name()).add("farewell").value()) {}

void Farewell::say() noexcept {
  if (said_ || begun_ == 0 || communicator_.aborted()) {
    return;
  }
  said_ = true;
  for (const int rank : communicator_.ranks()) {
    try {
      if (rank != communicator_.control().rank()) {
        communicator_.control().send(rank, channel_, std::to_string(begun_));
      }
    } catch (const std::exception&) {
      // Who has left already needs no word.
    }
  }
}

Farewell::Place Farewell::of(int gone) {
  auto said = said_by_.find(gone);
  if (said == said_by_.end()) {
    try {
      if (const auto body = communicator_.control().try_receive(gone, channel_, Clock::now())) {
        std::uint64_t number = 0;
        (void)std::from_chars(body->data(), body->data() + body->size(), number);
        said = said_by_.emplace(gone, number).first;
      }
    } catch (const Error&) {
      // It has left without a word.
    }
  }
  if (said == said_by_.end()) {
    return Place::kUnknown;
  }
  return said->second >= begun_ ? Place::kBehind : Place::kBefore;
}

std::optional<int> Farewell::missing() {
  for (const int gone : departed()) {
    const Place place = of(gone);
    if (place == Place::kUnknown && !patience_) {
      patience_ = Clock::now() + kOnItsWay;
    }
    if (place == Place::kBefore || (place == Place::kUnknown && Clock::now() >= *patience_)) {
      return gone;
    }
  }
  return std::nullopt;
}

std::optional<int> Farewell::first_left() {
  const std::vector<int> gone = departed();
  const auto before = std::find_if(gone.begin(), gone.end(), [this](int rank) { return of(rank) == Place::kBefore; });
  if (before != gone.end()) {
    return *before;
  }
  return gone.empty() ? std::nullopt : std::optional(gone.front());
}

std::vector<int> Farewell::departed() const {
  const Control& control = communicator_.control();
  std::vector<int> gone = control.departed();
  const std::vector<int>& ranks = communicator_.ranks();
  std::erase_if(gone, [&ranks](int rank) { return std::find(ranks.begin(), ranks.end(), rank) == ranks.end(); });
  if (control.failure()) {
    gone.clear();
  }
  return gone;
}

}  // namespace hpcomm
