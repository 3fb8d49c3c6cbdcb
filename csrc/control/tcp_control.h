// Control over one TCP connection per peer, made by ControlListener. Private to this folder.
#pragma once

#include <poll.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread.h"
#include "control/control.h"
#include "control/heartbeat.h"
#include "control/inflow.h"
#include "control/outbox.h"
#include "control/socket.h"
#include "control/wait_table.h"
#include "control/wire.h"

namespace hpcomm::control {

class TcpControl final : public Control {
 public:
  // `connections[r]` is the open connection to rank r (invalid at `rank`, and where the job has no such rank);
  // `surplus[r]` are bytes that arrived behind the greeting. `heartbeat` as in ControlListener::connect.
  [[nodiscard]] static std::shared_ptr<Control> make(int rank, std::vector<Fd> connections,
                                                     std::vector<std::string> surplus,
                                                     std::chrono::milliseconds heartbeat);
  TcpControl(int rank, std::vector<Fd> connections, std::vector<std::string> surplus,
             std::chrono::milliseconds heartbeat);
  ~TcpControl() override;

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return static_cast<int>(peers_.size()); }
  void send(int peer, std::uint64_t channel, std::string_view body) override;
  std::optional<std::string> try_receive(int peer, std::uint64_t channel, Deadline until) override;
  void send_lent(int peer, std::uint64_t channel, LentBody body) override;
  std::optional<Body> try_receive_body(int peer, std::uint64_t channel, Deadline until) override;
  void land(int peer, std::uint64_t channel, MakePlace make) override;
  [[nodiscard]] bool lands(int /*peer*/) const override { return true; }
  void abort(const std::string& message) override;
  void close() noexcept override;
  void say_waiting(std::uint64_t wait, const std::optional<LongWait>& said) noexcept override;
  [[nodiscard]] bool has_ended(int peer) const override { return state_of(peer) == PeerState::kLost; }
  void say_why(std::string_view why) override;
  [[nodiscard]] std::string why_left(int peer) const override;
  [[nodiscard]] bool has_left(int peer) const override {
    return peer == rank_ ? is_closing() : state_of(peer) != PeerState::kOpen;
  }
  [[nodiscard]] std::vector<int> departed() const override;
  [[nodiscard]] std::vector<Silence> silences() const override;
  [[nodiscard]] std::optional<Error> failure() const override;
  std::uint64_t on_failure(std::function<void(const Error&)> listener) override;
  std::uint64_t on_departure(std::function<void(int)> listener) override;
  void remove_listener(std::uint64_t token) override;

 private:
  // How long close() waits for peers that take nothing of what is still to be sent. As long as that gets on, it waits:
  // a large message to a busy host takes its time.
  static constexpr std::chrono::seconds kCloseGrace{3};
  static constexpr std::chrono::seconds kCloseMost{30};  // in all
  enum class PeerState { kOpen, kLeft, kLost };
  [[nodiscard]] bool is_closing() const {
    require_own_process("state", rank_);
    std::lock_guard lock(mutex_);
    return closing_;
  }
  struct Peer {
    Fd fd;
    PeerState state = PeerState::kOpen;
    std::string why_left;
    std::unique_ptr<Inflow> incoming;  // the I/O thread's own
    Outbox outgoing;                   // what the socket did not take yet
    bool spoke = false;                // since the last heartbeat was due
    bool is_dropped = false;           // what comes from it; the I/O thread's own
  };
  struct Inbox {
    std::list<Body> messages;
    std::condition_variable arrived;
    int waiting = 0;       // threads
    MakePlace make_place;  // of long messages
  };
  using Inboxes = std::map<std::pair<int, std::uint64_t>, Inbox>;
  // Who has lent a body and is to hear what became of it: why it was not sent, if it was not.
  struct Told {
    Outbox::Sent sent;
    std::optional<Error> why;
  };

  [[nodiscard]] bool forked() const noexcept;
  void require_own_process(const char* operation, int peer = -1) const;
  [[nodiscard]] PeerState state_of(int peer) const;
  // The peer of a message that may be sent. With mutex_ held.
  [[nodiscard]] Peer& recipient(int peer);
  void run();
  void beat();
  void look_for_silence(Deadline now);
  void hear(int peer);
  // Who waits for long, where this is the first rank of those that are there.
  void show_waits(Deadline now);
  [[nodiscard]] std::vector<int> present() const;  // with mutex_ held; this rank is
  void read_from(int peer);
  // Of what was read, so many bytes that lie where they will be, and those behind them.
  void take_in(int peer, std::size_t landed, std::span<const char> bytes);
  void drop(int peer);
  // Ends the job: this rank has no memory.
  void run_short(const Error& why);
  void deliver(int peer, Inflow::Arrival arrival);
  [[nodiscard]] Buffer place_of(int peer, std::uint64_t channel, std::size_t bytes);
  // Until one of `fds` is ready, or `until`; `in_midst` of a long message, in either direction.
  static void rest(std::vector<pollfd>& fds, bool in_midst, Deadline until);
  void flush(Peer& peer);
  void send_frame(Peer& peer, FrameKind kind, std::uint64_t channel, std::string_view body);
  void put_frame(Peer& peer, FrameKind kind, std::uint64_t channel, std::string_view body);
  // For who needs a rank that has left. With mutex_ held.
  [[nodiscard]] Error left(int peer, const char* operation) const;
  // With mutex_ held: drops what nobody uses.
  void tidy(Inboxes::iterator inbox);
  // Called with mutex_ held. `but`: a rank that is not told.
  void tell_all(FrameKind kind, std::uint64_t channel, std::string_view text, int but = -1);
  void forget(std::vector<Outbox::Sent> told, const Error& why);
  void lose(int peer, const std::string& why);
  void leave(int peer, PeerState how);
  void fail(Error error);
  void notify_listeners();
  // Says what became of lent bodies. Called without mutex_.
  void tell_lenders() noexcept;
  void wake() const noexcept;

  const int rank_;
  const std::uint32_t generation_;  // of the process that made it
  Heartbeat heartbeat_;             // the I/O thread's own
  // Guards everything below but the listeners. No listener and no blocking call runs under it.
  mutable std::mutex mutex_;
  std::vector<Peer> peers_;
  Inboxes inboxes_;  // with messages, a place for them, or somebody who waits
  std::optional<Error> failure_;
  std::vector<int> departed_;      // in the order in which they left
  std::vector<Silence> silences_;  // that have not ended
  std::vector<Told> told_;         // for tell_lenders()
  WaitTable waits_;                // of the ranks that say so to this one, and its own
  bool closing_ = false;
  std::string why_;        // this rank leaves
  bool was_told_ = false;  // of failure_, by another rank
  bool stop_ = false;

  // Held while listeners run, so that remove_listener can promise that none is running. Taken before mutex_.
  mutable std::mutex listeners_mutex_;
  std::map<std::uint64_t, std::function<void(const Error&)>> listeners_;
  std::map<std::uint64_t, std::function<void(int)>> departure_listeners_;
  std::uint64_t next_listener_ = 1;
  bool notified_ = false;          // of the failure
  std::size_t told_departed_ = 0;  // how many of departed_ the listeners know

  Fd wake_;
  Thread thread_;  // last: it starts when everything above exists
};

}  // namespace hpcomm::control
