// Control: small ordered messages between all ranks of a job, abort, and the death of a peer. CPU only.
//
// One TCP connection per pair of ranks and one I/O thread per process; comm/shm/near_control.h carries the messages
// between ranks of one host. Headers, plan hashes and errors travel here, and tensors of an edge over gloo behind their
// header (engine/window.h). A send never waits for the receiver: what the socket does not take is queued. Long bodies
// go in pieces, which short messages of other channels overtake.
//
// A Control belongs to the process that made it. In a forked child its sockets are closed, abort() and close() do
// nothing, and everything else raises kClosed.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/view.h"
#include "control/long_wait.h"
#include "control/socket.h"
#include "control/wire.h"
#include "stream/event.h"

namespace hpcomm {

// A body that is sent from where it lies. `sent` runs once, on any thread: with null when the bytes have been taken,
// with the reason when they never will be. It holds what they lie in, and must neither block nor call a Control.
struct LentBody {
  std::vector<std::string_view> parts;
  std::function<void(const Error* why)> sent;

  [[nodiscard]] std::size_t bytes() const noexcept;
};

// A message that has come: in the place that was made for it, or in memory of its own.
struct Body {
  std::string text;
  Buffer place;  // where its owner is not null

  [[nodiscard]] std::string_view view() const noexcept {
    return place.owner == nullptr ? std::string_view(text)
                                  : std::string_view(static_cast<const char*>(place.view.data), place.view.bytes);
  }
};

// Makes the place of a long body of so many bytes, or an empty Buffer. Runs on the I/O thread when they are announced:
// it must not block.
using MakePlace = std::function<Buffer(std::size_t bytes)>;

class Control {
 public:
  virtual ~Control() = default;

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;

  // Messages of one (peer, channel) arrive in the order they were sent; channels are independent. Throws the job's
  // failure when there is one.
  virtual void send(int peer, std::uint64_t channel, std::string_view body) = 0;
  // The next message, or nothing when `until` came first. Throws the job's failure.
  virtual std::optional<std::string> try_receive(int peer, std::uint64_t channel, Deadline until) = 0;
  // The same for long messages, without the copies. Those of both kinds keep one order.
  virtual void send_lent(int peer, std::uint64_t channel, LentBody body);
  virtual std::optional<Body> try_receive_body(int peer, std::uint64_t channel, Deadline until);
  // From now on long bodies of this channel are read into what `make` gives; null ends that. Only where lands().
  virtual void land(int /*peer*/, std::uint64_t /*channel*/, MakePlace /*make*/) {}
  // Whether long messages from and to `peer` are copied by nobody but the kernel.
  [[nodiscard]] virtual bool lands(int /*peer*/) const { return false; }
  // The next message. `poll`, if there is one, is called twenty times a second meanwhile, and may throw. Throws that,
  // kTimedOut, or the job's failure.
  [[nodiscard]] std::string receive(int peer, std::uint64_t channel, Deadline deadline, void (*poll)() = nullptr);

  // Tells every peer that this rank cannot go on, and why: their operations raise kPeerError with `message`.
  virtual void abort(const std::string& message) = 0;
  // What the peers will read of why this rank has left: an error that ends it and that they have not caused. Before
  // close().
  virtual void say_why(std::string_view /*why*/) {}
  // Leaves in order: peers that still wait for this rank raise, others go on. Idempotent.
  virtual void close() noexcept = 0;

  // Tells the first rank that is there of this rank's wait number `wait`, or that it is over (null). That rank shows on
  // stderr who waits in what. Never throws.
  virtual void say_waiting(std::uint64_t /*wait*/, const std::optional<control::LongWait>& /*said*/) noexcept {}

  // True when `peer`'s connection has ended: its process is gone, or it closed its Control.
  [[nodiscard]] virtual bool has_ended(int peer) const = 0;
  // True when nothing more will come from `peer`: it said goodbye, its connection has ended, or it is us after close().
  [[nodiscard]] virtual bool has_left(int peer) const = 0;
  // What it said of why; empty where it said nothing.
  [[nodiscard]] virtual std::string why_left(int /*peer*/) const { return {}; }
  // departure_text(), of what it said.
  [[nodiscard]] std::string departure_of(int peer) const;
  // Peers of which that is true, in the order in which this rank heard of it.
  [[nodiscard]] virtual std::vector<int> departed() const { return {}; }
  // Peers of which nothing has been heard for a quarter of the heartbeat's limit or more, and since when.
  struct Silence {
    int peer;
    Deadline since;
  };
  [[nodiscard]] virtual std::vector<Silence> silences() const { return {}; }
  // The first failure of the job that this rank knows of: kRankFailed or kPeerError.
  [[nodiscard]] virtual std::optional<Error> failure() const = 0;
  // Throws failure().
  void check() const {
    if (auto error = failure()) {
      throw Error(*error);
    }
  }
  // `listener` runs once, on the I/O thread (or at once when it is already too late), at the first failure. It must
  // not block. Returns a token for remove_listener, after which it neither runs nor is running.
  virtual std::uint64_t on_failure(std::function<void(const Error&)> listener) = 0;
  // `listener` runs once for each peer that leaves, in order or not, under the rules of on_failure. Those that have
  // left already are told at once. Neither kind of listener adds or removes listeners, or aborts.
  virtual std::uint64_t on_departure(std::function<void(int peer)> listener) = 0;
  virtual void remove_listener(std::uint64_t token) = 0;

  // Gathers one message from each of `ranks` (this rank among them), in that order. Collective over `ranks`. Waits as
  // receive() does.
  [[nodiscard]] std::vector<std::string> exchange(const std::vector<int>& ranks, std::uint64_t channel,
                                                  const std::string& body, Deadline deadline, void (*poll)() = nullptr);
  // Behind an exchange in which all of `ranks` have found the same reason to fail: waits until all have found it, or a
  // few seconds for one that is slow. Whoever failed sooner could end before others have heard of everybody, and they
  // would hear of that instead. Throws what `poll` throws. Collective over `ranks`.
  void let_all_find_out(const std::vector<int>& ranks, std::uint64_t channel, void (*poll)() = nullptr);
};

// "rank 2 has left the job", and why where that was said.
[[nodiscard]] std::string departure_text(int peer, std::string_view why);

// A job of one rank: nobody to talk to.
[[nodiscard]] std::shared_ptr<Control> make_solo_control();

// How long a peer may be silent before it counts as lost.
inline constexpr std::chrono::seconds kHeartbeatLimit{20};

// Bound and listening, not connected yet: the caller publishes address() and collects those of the others.
class ControlListener {
 public:
  // Listens on `host` (a numeric address of one interface), on a port that the kernel picks.
  ControlListener(const std::string& host, int rank, int size, control::JobToken token);
  ~ControlListener();

  [[nodiscard]] const std::string& address() const noexcept { return address_; }  // "host:port"

  // Connects to every lower rank and accepts every higher one. `addresses[r]` is rank r's, empty when the job has no
  // such rank. Strangers that connect meanwhile are dropped with a line on stderr for each kind of them. Throws
  // kTimedOut with the ranks that are missing, kRankFailed when one goes away meanwhile, kTransport when this process
  // may open no more files. The listener is closed then: nobody can join later. `heartbeat` limits the silence of a
  // peer; 0: for ever. The same on every rank. `poll`, if any, is called about twenty times a second; what it throws
  // ends the start of all.
  [[nodiscard]] std::shared_ptr<Control> connect(const std::vector<std::string>& addresses, Deadline deadline,
                                                 std::chrono::milliseconds heartbeat = kHeartbeatLimit,
                                                 void (*poll)() = nullptr);

 private:
  control::Fd fd_;
  int rank_;
  int size_;
  control::JobToken token_;
  std::string address_;
};

}  // namespace hpcomm
