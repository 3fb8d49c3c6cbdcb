// TreeReceiver: the receiving end of an edge as Python sees it: whole trees, threads, signals, limits.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "engine/edge.h"

namespace hpcomm {

// All with the GIL. Threads may share it: each call takes the next message.
class TreeReceiver {
 public:
  explicit TreeReceiver(EdgeConfig config);

  // Asks for the next message. On a GPU the host waits for the header here. Throws kInvalidArgument, as take() does, in
  // a signal's handler that interrupted take() in this thread: it would get the message after that one.
  [[nodiscard]] Receipt recv(int microbatch);
  // The next message; within `timeout` seconds, if that is not negative. Without a limit it is received by this thread
  // where nothing is before it, and tensors are made while it is on its way. Whatever it throws but what the edge
  // throws, the next call goes on with that message.
  [[nodiscard]] pybind11::object take(int microbatch, double timeout);
  // RecvEdge::expect() of what is like `tree`.
  void expect(const pybind11::object& tree);

 private:
  class Taking;

  void require_outside() const;
  [[nodiscard]] Receipt issue(int microbatch, Deadline deadline);
  // Without the GIL. Throws kTimedOut.
  [[nodiscard]] std::unique_lock<std::timed_mutex> take_turn(Deadline deadline);
  // `seconds` as in take(); they end at `deadline`.
  void wait(const Receipt& receipt, double seconds, Deadline deadline);
  template <class Make>
  [[nodiscard]] pybind11::object hand_over(const Receipt& receipt, const Make& make);
  void keep(const Receipt& receipt);
  [[nodiscard]] std::optional<Receipt> first_overdue();

  std::timed_mutex mutex_;  // held by the thread whose turn it is to ask
  RecvEdge edge_;
  // A thread has waited for another one's message: from now on none waits within its turn, nor receives by itself.
  std::atomic<bool> is_shared_ = false;
  // Receipts whose callers went away without the message, by sequence number.
  std::map<std::uint64_t, Receipt> overdue_;
};

// The tree of a message that has come.
[[nodiscard]] pybind11::object to_tree(const Incoming& message);

}  // namespace hpcomm
