// Who sees what: a sender publishes and then looks for sleepers, a receiver counts itself as one and then looks again.
#include "comm/shm/near_control.h"

#include <algorithm>
#include <array>
#include <new>

#include "base/fork.h"
#include "base/host_memory.h"
#include "control/channels.h"

namespace hpcomm::shm {

namespace {

using control::kDetourChannel;

constexpr std::size_t kAllRings = std::size_t{8} << 20;
constexpr std::size_t kLargestRing = std::size_t{64} << 10;
constexpr std::size_t kSmallestRing = std::size_t{1} << 10;
// How long a receiver holds its inbox while a message that took the other way is under way.
constexpr auto kDetourSlice = std::chrono::milliseconds(1);

struct Prefix {
  std::uint64_t number;
  std::uint64_t channel;
  std::uint64_t bytes;
};

constexpr std::size_t padded(std::size_t bytes) { return round_up(bytes, kCacheLine); }

}  // namespace

std::size_t NearControl::ring_bytes_for(std::size_t ranks) noexcept {
  return std::clamp(kAllRings / (ranks * ranks) / kCacheLine * kCacheLine, kSmallestRing, kLargestRing);
}

std::size_t NearControl::segment_bytes(std::size_t ranks, std::size_t ring_bytes) noexcept {
  return ranks * sizeof(Bell) + ranks * ranks * (sizeof(Ends) + ring_bytes);
}

std::shared_ptr<NearControl> NearControl::over(std::shared_ptr<Control> below,
                                               std::shared_ptr<Neighbourhood> neighbourhood, Deadline deadline,
                                               void (*poll)()) {
  const std::vector<int>& ranks = neighbourhood->ranks();
  const std::size_t ring_bytes = ring_bytes_for(ranks.size());
  std::shared_ptr<Segment> segment;
  if (ranks.size() > 1) {
    try {  // all of them have it or none: a message that its receiver does not look for would be lost
      segment = neighbourhood->share("control messages of neighbours", ranks, segment_bytes(ranks.size(), ring_bytes),
                                     deadline, poll);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTransport) {
        throw;
      }
    }
  }
  return std::shared_ptr<NearControl>(
      new NearControl(std::move(below), std::move(neighbourhood), std::move(segment), ring_bytes));
}

NearControl::NearControl(std::shared_ptr<Control> below, std::shared_ptr<Neighbourhood> neighbourhood,
                         std::shared_ptr<Segment> segment, std::size_t ring_bytes)
    : below_(std::move(below)),
      neighbourhood_(std::move(neighbourhood)),
      segment_(std::move(segment)),
      capacity_(ring_bytes),
      generation_(fork_generation()),
      policy_(neighbourhood_->wait_policy()),
      neighbours_(static_cast<std::size_t>(below_->size())) {
  if (segment_ == nullptr) {
    return;
  }
  segment_->close_descriptor();
  divide_segment();
  failures_ = below_->on_failure([this](const Error&) {
    stopped_ = true;
    ring_always(*bell_);
  });
  departures_ = below_->on_departure([this](int peer) {
    if (Neighbour* const gone = neighbours_[static_cast<std::size_t>(peer)].get()) {
      gone->left = true;
      ring_always(*bell_);
    }
  });
}

// The segment is zero, which is what everything in it starts from: no rank waits for another to construct it.
void NearControl::divide_segment() {
  const std::vector<int>& ranks = neighbourhood_->ranks();
  const std::size_t n = ranks.size();
  auto* const bells = std::launder(reinterpret_cast<Bell*>(segment_->data()));
  auto* const ends = std::launder(reinterpret_cast<Ends*>(segment_->data() + n * sizeof(Bell)));
  char* const rings = segment_->data() + n * sizeof(Bell) + n * n * sizeof(Ends);
  const auto self =
      static_cast<std::size_t>(std::lower_bound(ranks.begin(), ranks.end(), below_->rank()) - ranks.begin());
  bell_ = &bells[self];
  for (std::size_t i = 0; i < n; ++i) {
    if (i != self) {
      const std::size_t out = self * n + i;
      const std::size_t in = i * n + self;
      neighbours_[static_cast<std::size_t>(ranks[i])] = std::make_unique<Neighbour>(
          ends[out], rings + out * capacity_, ends[in], rings + in * capacity_, capacity_, bells[i]);
    }
  }
}

NearControl::~NearControl() {
  if (segment_ != nullptr) {
    below_->remove_listener(failures_);
    below_->remove_listener(departures_);
  }
}

NearControl::Neighbour* NearControl::neighbour(int peer) const noexcept {
  const bool known = peer >= 0 && static_cast<std::size_t>(peer) < neighbours_.size();
  return known && fork_generation() == generation_ ? neighbours_[static_cast<std::size_t>(peer)].get() : nullptr;
}

void NearControl::send(int peer, std::uint64_t channel, std::string_view body) {
  Neighbour* const to = neighbour(peer);
  if (to == nullptr) {
    below_->send(peer, channel, body);
    return;
  }
  if (stopped_ || to->left) {
    below_->check();
    if (to->left) {
      throw Error(ErrorKind::kRankFailed, below_->departure_of(peer), {rank(), peer, -1, "send"});
    }
    throw Error(ErrorKind::kClosed, "control message after close()", {rank(), peer, -1, "send"});
  }
  std::lock_guard lock(to->outbox.mutex);
  Outbox& outbox = to->outbox;
  const Prefix prefix{outbox.next, channel, body.size()};
  const std::size_t bytes = padded(sizeof prefix + body.size());
  // Not more than half of the ring for one message: the next one would find no room.
  if (bytes <= capacity_ / 2 && outbox.ring.room(bytes) == bytes) {
    outbox.ring.write(&prefix, sizeof prefix);
    outbox.ring.write(body.data(), body.size());
    outbox.ring.pad();
    outbox.ring.publish();
  } else {
    std::string detour(reinterpret_cast<const char*>(&prefix), sizeof prefix);
    detour.append(body);
    below_->send(peer, kDetourChannel, detour);
    to->out_ends.detoured.fetch_add(1, std::memory_order_seq_cst);
  }
  ++outbox.next;
  ring(to->bell);
}

// What is long goes straight to those that are not near; to the others, as any message.
void NearControl::send_lent(int peer, std::uint64_t channel, LentBody body) {
  if (is_near(peer)) {
    Control::send_lent(peer, channel, std::move(body));
  } else {
    below_->send_lent(peer, channel, std::move(body));
  }
}

std::optional<Body> NearControl::try_receive_body(int peer, std::uint64_t channel, Deadline until) {
  return is_near(peer) ? Control::try_receive_body(peer, channel, until)
                       : below_->try_receive_body(peer, channel, until);
}

void NearControl::land(int peer, std::uint64_t channel, MakePlace make) {
  if (!is_near(peer)) {
    below_->land(peer, channel, std::move(make));
  }
}

std::optional<std::string> NearControl::try_receive(int peer, std::uint64_t channel, Deadline until) {
  Neighbour* const from = neighbour(peer);
  if (from == nullptr) {
    return below_->try_receive(peer, channel, until);
  }
  Inbox& inbox = from->inbox;
  for (;;) {
    // Before the look into the inbox: what was sent before the end must be found.
    const bool over = stopped_ || from->left;
    std::uint64_t deliveries = 0;
    {
      std::lock_guard lock(inbox.mutex);
      const std::uint64_t before = inbox.deliveries;
      take_from_ring(*from, peer);
      auto mine = inbox.ready.find(channel);
      if (mine == inbox.ready.end()) {
        take_detours(*from, peer, until);
        mine = inbox.ready.find(channel);
      }
      deliveries = inbox.deliveries;
      const bool found = mine != inbox.ready.end();
      if (deliveries - before > (found ? 1U : 0U)) {
        ring(*bell_);  // other threads wait for what this one has taken in
      }
      if (found) {
        inbox.idle = false;
        std::string body = std::move(mine->second.front());
        mine->second.pop_front();
        if (mine->second.empty()) {
          inbox.ready.erase(mine);
        }
        return body;
      }
    }
    if (over) {
      (void)below_->try_receive(peer, channel, Clock::now());  // throws why
    }
    if (Clock::now() >= until) {
      return std::nullopt;
    }
    const auto news = [&] {
      return from->in_ends.ring.written.load(std::memory_order_seq_cst) != inbox.position.load() ||
             from->in_ends.detoured.load(std::memory_order_seq_cst) != inbox.detours.load() ||
             inbox.deliveries.load() != deliveries;
    };
    const WaitPolicy policy = inbox.idle ? WaitPolicy{0, std::chrono::microseconds(0)} : policy_;
    if (wait_on(*bell_, policy, {until, &stopped_, &from->left}, news) == Waited::kTimedOut) {
      inbox.idle = true;
    }
  }
}

void NearControl::close() noexcept {
  if (fork_generation() != generation_) {
    return;  // the parent has not left
  }
  stopped_ = true;
  below_->close();
  if (bell_ != nullptr) {
    ring_always(*bell_);
  }
}

// With the inbox locked, as the two below.
void NearControl::take_from_ring(Neighbour& from, int peer) {
  Inbox& inbox = from.inbox;
  std::size_t available = inbox.ring.available(capacity_);
  if (available == 0) {
    return;
  }
  while (available > 0) {
    Prefix prefix{};
    HPCOMM_ASSERT(available >= sizeof prefix, "rank ", peer, ": half a message in the ring");
    inbox.ring.read(&prefix, sizeof prefix);
    const std::size_t bytes = padded(sizeof prefix + static_cast<std::size_t>(prefix.bytes));
    HPCOMM_ASSERT(prefix.bytes < capacity_ && bytes <= available, "rank ", peer, ": a message of ", prefix.bytes,
                  " bytes in a ring of ", capacity_);
    std::string body(static_cast<std::size_t>(prefix.bytes), '\0');
    inbox.ring.read(body.data(), body.size());
    inbox.ring.pad();
    available -= bytes;
    accept(inbox, prefix.number, {prefix.channel, std::move(body)});
  }
  inbox.ring.release();
  inbox.position = inbox.ring.position();
}

void NearControl::take_detours(Neighbour& from, int peer, Deadline until) {
  Inbox& inbox = from.inbox;
  while (inbox.detours != from.in_ends.detoured.load(std::memory_order_seq_cst)) {
    const auto detour = below_->try_receive(peer, kDetourChannel, std::min(until, Clock::now() + kDetourSlice));
    if (!detour) {
      return;  // under way
    }
    Prefix prefix{};
    if (detour->size() < sizeof prefix) {
      throw Error(ErrorKind::kProtocol, str("rank ", peer, " sent half a control message"));
    }
    detour->copy(reinterpret_cast<char*>(&prefix), sizeof prefix);
    ++inbox.detours;
    accept(inbox, prefix.number, {prefix.channel, detour->substr(sizeof prefix)});
  }
}

void NearControl::accept(Inbox& inbox, std::uint64_t number, Message message) {
  if (number != inbox.due) {
    inbox.early.emplace(number, std::move(message));
    return;
  }
  auto deliver = [&inbox](Message arrived) {
    inbox.ready[arrived.channel].push_back(std::move(arrived.body));
    ++inbox.due;
    ++inbox.deliveries;
  };
  deliver(std::move(message));
  for (auto next = inbox.early.find(inbox.due); next != inbox.early.end(); next = inbox.early.find(inbox.due)) {
    Message early = std::move(next->second);
    inbox.early.erase(next);
    deliver(std::move(early));
  }
}

}  // namespace hpcomm::shm
