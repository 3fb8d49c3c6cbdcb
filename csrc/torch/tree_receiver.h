// TreeReceiver: the receiving end of an edge as Python sees it: whole trees, threads, signals, limits.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "engine/edge.h"

namespace hpcomm {

class TreeReceiver;

// A message that was asked for; it may outlive the edge.
class PendingTree {
 public:
  PendingTree(Receipt receipt, const std::shared_ptr<TreeReceiver>& receiver);
  // As wait_for() waits.
  [[nodiscard]] pybind11::object wait(double timeout) const;
  [[nodiscard]] bool done() const { return receipt_.work->done(); }

 private:
  Receipt receipt_;
  std::weak_ptr<TreeReceiver> receiver_;
  std::string edge_name_;
  std::chrono::milliseconds limit_;
};

// All with the GIL. Threads may share it: each call takes the next message. A message whose tree cannot be built ends
// the edge, as any other mismatch does.
class TreeReceiver : public std::enable_shared_from_this<TreeReceiver> {
 public:
  explicit TreeReceiver(EdgeConfig config);

  // Asks for the next message. On a GPU the host waits for the header here. Throws kInvalidArgument, as take() does, in
  // a signal's handler that interrupted take() in this thread: it would get the message after that one.
  [[nodiscard]] PendingTree recv(int microbatch);
  // The next message; within `timeout` seconds, if that is not negative. Without a limit it is received by this thread
  // where nothing is before it, and tensors are made while it is on its way. Whatever it throws but what the edge
  // throws, the next call goes on with that message.
  [[nodiscard]] pybind11::object take(int microbatch, double timeout);
  // take() of what the peer answers to the message of `microbatch` that `sent` has sent. Throws what the peer refused
  // that message for, too, or one before it: then no answer comes, and this edge ends as well.
  [[nodiscard]] pybind11::object take_answer(int microbatch, const SendEdge& sent);
  // RecvEdge::expect() of what is like `tree`.
  void expect(const pybind11::object& tree);

  // What was wrong with the tree of a message: ends the edge where it was the message's fault. To be thrown.
  [[nodiscard]] Error refusal_of(const Receipt& receipt, const Error& why);
  [[nodiscard]] int missed() const noexcept { return edge_.missed(); }
  [[nodiscard]] int came() const noexcept { return edge_.came(); }
  [[nodiscard]] std::string edge_name() const { return edge_.name(); }
  [[nodiscard]] std::chrono::milliseconds edge_timeout() const noexcept { return edge_.timeout(); }

 private:
  class Taking;

  // `sent` as for take_answer(), or null.
  [[nodiscard]] pybind11::object take(int microbatch, double timeout, const SendEdge* sent);
  void require_outside() const;
  // Ends the edge because what it answers was refused.
  void end_with(const Error& why, int microbatch);
  // `patience`: how long the message may take to begin; 0 for the communicator's time-out.
  [[nodiscard]] Receipt issue(int microbatch, Deadline deadline, std::chrono::milliseconds patience);
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

}  // namespace hpcomm
