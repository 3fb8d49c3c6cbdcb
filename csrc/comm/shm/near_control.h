// NearControl: a Control whose messages between ranks of one host travel through shared memory.
//
// Everything else (other hosts, abort, departures, the death of a peer) is that of the Control below it. So is what a
// ring cannot take: messages are numbered per pair of ranks, and those that went the other way are put back in order.
// A send never waits for its receiver.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/shm/bell.h"
#include "comm/shm/neighbourhood.h"
#include "comm/shm/ring.h"
#include "comm/shm/segment.h"
#include "control/control.h"

namespace hpcomm::shm {

class NearControl final : public Control {
 public:
  // Collective over the neighbourhood. Without neighbours, or without memory, all messages are those of `below`.
  // Waits as Control::receive() does. Throws kTimedOut or the job's failure.
  [[nodiscard]] static std::shared_ptr<NearControl> over(std::shared_ptr<Control> below,
                                                         std::shared_ptr<Neighbourhood> neighbourhood,
                                                         Deadline deadline, void (*poll)() = nullptr);
  ~NearControl() override;

  [[nodiscard]] const std::shared_ptr<Neighbourhood>& neighbourhood() const noexcept { return neighbourhood_; }

  // Whether messages to `peer` travel through shared memory.
  [[nodiscard]] bool is_near(int peer) const noexcept { return neighbour(peer) != nullptr; }

  [[nodiscard]] int rank() const noexcept override { return below_->rank(); }
  [[nodiscard]] int size() const noexcept override { return below_->size(); }
  void send(int peer, std::uint64_t channel, std::string_view body) override;
  std::optional<std::string> try_receive(int peer, std::uint64_t channel, Deadline until) override;
  void send_lent(int peer, std::uint64_t channel, LentBody body) override;
  std::optional<Body> try_receive_body(int peer, std::uint64_t channel, Deadline until) override;
  void land(int peer, std::uint64_t channel, MakePlace make) override;
  [[nodiscard]] bool lands(int peer) const override { return !is_near(peer) && below_->lands(peer); }
  void abort(const std::string& message) override { below_->abort(message); }
  void close() noexcept override;
  void say_waiting(std::uint64_t wait, const std::optional<control::LongWait>& said) noexcept override {
    below_->say_waiting(wait, said);
  }
  [[nodiscard]] bool has_ended(int peer) const override { return below_->has_ended(peer); }
  void say_why(std::string_view why) override { below_->say_why(why); }
  [[nodiscard]] std::string why_left(int peer) const override { return below_->why_left(peer); }
  [[nodiscard]] bool has_left(int peer) const override {
    return (peer != rank() || stopped_) && below_->has_left(peer);  // asked of this rank with every message
  }
  [[nodiscard]] std::vector<int> departed() const override { return below_->departed(); }
  [[nodiscard]] std::vector<Silence> silences() const override { return below_->silences(); }
  [[nodiscard]] std::optional<Error> failure() const override { return below_->failure(); }
  std::uint64_t on_failure(std::function<void(const Error&)> listener) override {
    return below_->on_failure(std::move(listener));
  }
  std::uint64_t on_departure(std::function<void(int)> listener) override {
    return below_->on_departure(std::move(listener));
  }
  void remove_listener(std::uint64_t token) override { below_->remove_listener(token); }

 private:
  // Of one ordered pair of ranks, in the segment.
  struct Ends {
    RingEnds ring;
    alignas(64) std::atomic<std::uint64_t> detoured;  // messages that took the other way
  };
  struct Message {
    std::uint64_t channel;
    std::string body;
  };
  struct Outbox {
    explicit Outbox(RingWriter writer) : ring(writer) {}
    std::mutex mutex;  // guards what follows
    RingWriter ring;
    std::uint64_t next = 0;  // number of the next message
  };
  struct Inbox {
    explicit Inbox(RingReader reader) : ring(reader) {}
    std::mutex mutex;  // guards what follows, up to the atomics
    RingReader ring;
    std::uint64_t due = 0;                                  // number of the next message
    std::map<std::uint64_t, Message> early;                 // came before the ones that are due
    std::map<std::uint64_t, std::list<std::string>> ready;  // by channel; none is empty
    // What waiting threads watch.
    std::atomic<std::uint64_t> position{0};    // in the ring
    std::atomic<std::uint64_t> detours{0};     // taken
    std::atomic<std::uint64_t> deliveries{0};  // to any channel
    std::atomic<bool> idle{false};             // the last wait was in vain: do not spin again
  };
  struct Neighbour {
    Neighbour(Ends& out, char* out_data, Ends& in, const char* in_data, std::size_t capacity, Bell& its_bell)
        : out_ends(out),
          in_ends(in),
          bell(its_bell),
          outbox(RingWriter(out.ring, out_data, capacity)),
          inbox(RingReader(in.ring, in_data, capacity)) {}
    Ends& out_ends;
    Ends& in_ends;
    Bell& bell;
    Outbox outbox;
    Inbox inbox;
    std::atomic<bool> left{false};
  };

  NearControl(std::shared_ptr<Control> below, std::shared_ptr<Neighbourhood> neighbourhood,
              std::shared_ptr<Segment> segment, std::size_t ring_bytes);
  void divide_segment();
  [[nodiscard]] static std::size_t ring_bytes_for(std::size_t ranks) noexcept;
  [[nodiscard]] static std::size_t segment_bytes(std::size_t ranks, std::size_t ring_bytes) noexcept;

  // Null for ranks that are not neighbours, and in a forked child: the Control below knows what to say.
  [[nodiscard]] Neighbour* neighbour(int peer) const noexcept;
  void take_from_ring(Neighbour& from, int peer);
  void take_detours(Neighbour& from, int peer, Deadline until);
  static void accept(Inbox& inbox, std::uint64_t number, Message message);

  const std::shared_ptr<Control> below_;
  const std::shared_ptr<Neighbourhood> neighbourhood_;
  const std::shared_ptr<Segment> segment_;  // may be null
  const std::size_t capacity_;              // of a ring
  const std::uint32_t generation_;
  const WaitPolicy policy_;
  Bell* bell_ = nullptr;                                // this rank's
  std::vector<std::unique_ptr<Neighbour>> neighbours_;  // by rank of the job
  std::atomic<bool> stopped_{false};                    // failed or closed
  std::uint64_t failures_ = 0;                          // tokens of the listeners
  std::uint64_t departures_ = 0;
};

}  // namespace hpcomm::shm
