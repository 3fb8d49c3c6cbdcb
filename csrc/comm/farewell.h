// Farewell: how far a rank had come in a communicator's collectives when it left.
//
// Over a transport of its own, as gloo's TCP, what a rank has sent may come long after Control's word that it has left:
// who waits for a collective that it had ended waits on, and whoever waits for one that it never began need not wait.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "comm/communicator.h"

namespace hpcomm {

class Farewell {
 public:
  // `communicator` outlives it.
  explicit Farewell(const Communicator& communicator);

  // The next collective begins, on whatever thread executes them.
  void note_begun() noexcept { ++begun_; }
  // Tells the others, when all has ended; the next thing that they hear of this rank may be that it has left. Once.
  void say() noexcept;

  // A rank of the job for which it is vain to wait in the collective that has begun here: it left before that one, or
  // a while ago and without a word. None while a failure of the job is known, which says more.
  [[nodiscard]] std::optional<int> missing();
  // The first that left, rather one that left before that collective: whose end has closed a connection.
  [[nodiscard]] std::optional<int> first_left();

 private:
  // Of a rank that has left: before the collective that has begun here, behind it, or without a word.
  enum class Place : std::uint8_t { kBefore, kBehind, kUnknown };
  [[nodiscard]] Place of(int gone);
  // In the order in which this rank heard of it.
  [[nodiscard]] std::vector<int> departed() const;

  const Communicator& communicator_;
  const std::uint64_t channel_;
  std::uint64_t begun_ = 0;
  bool said_ = false;
  std::map<int, std::uint64_t> said_by_;
  std::optional<Deadline> patience_;  // with those that have left without a word
};

}  // namespace hpcomm
