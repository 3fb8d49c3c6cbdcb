// What every Control shares, and the Control of a job of one.
#include "control/control.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

namespace hpcomm {

namespace {

class SoloControl final : public Control {
 public:
  [[nodiscard]] int rank() const noexcept override { return 0; }
  [[nodiscard]] int size() const noexcept override { return 1; }
  void send(int peer, std::uint64_t, std::string_view) override { nobody(peer); }
  std::optional<std::string> try_receive(int peer, std::uint64_t, Deadline) override { nobody(peer); }
  // Nothing can fail behind this rank's back, but it can give up itself.
  void abort(const std::string& message) override {
    std::lock_guard order(listeners_mutex_);
    {
      std::lock_guard lock(mutex_);
      if (failure_) {
        return;
      }
      failure_ = Error(ErrorKind::kClosed, "this rank gave up: " + message, {0, -1, -1, "abort"});
    }
    for (auto& [token, listener] : listeners_) {
      listener(*failure_);
    }
    listeners_.clear();
  }
  void close() noexcept override {}
  [[nodiscard]] bool has_ended(int peer) const override { nobody(peer); }
  [[nodiscard]] bool has_left(int peer) const override { nobody(peer); }
  [[nodiscard]] std::optional<Error> failure() const override {
    std::lock_guard lock(mutex_);
    return failure_;
  }
  std::uint64_t on_failure(std::function<void(const Error&)> listener) override {
    std::lock_guard order(listeners_mutex_);
    if (const auto error = failure()) {
      listener(*error);
      return 0;
    }
    listeners_.emplace(next_listener_, std::move(listener));
    return next_listener_++;
  }
  std::uint64_t on_departure(std::function<void(int)>) override { return 0; }  // nobody to leave
  void remove_listener(std::uint64_t token) override {
    std::lock_guard order(listeners_mutex_);
    listeners_.erase(token);
  }

 private:
  [[noreturn]] static void nobody(int peer) {
    throw Error(ErrorKind::kInvalidArgument, str("rank ", peer, " does not exist: this job has one rank"));
  }

  mutable std::mutex mutex_;
  std::optional<Error> failure_;
  // Held while listeners run, as in TcpControl. Taken before mutex_.
  std::mutex listeners_mutex_;
  std::map<std::uint64_t, std::function<void(const Error&)>> listeners_;
  std::uint64_t next_listener_ = 1;
};

}  // namespace

std::size_t LentBody::bytes() const noexcept {
  return std::accumulate(parts.begin(), parts.end(), std::size_t{0},
                         [](std::size_t sum, std::string_view part) { return sum + part.size(); });
}

void Control::send_lent(int peer, std::uint64_t channel, LentBody body) {
  std::string whole;
  whole.reserve(body.bytes());
  for (const std::string_view part : body.parts) {
    whole += part;
  }
  send(peer, channel, whole);
  body.sent(nullptr);
}

std::optional<Body> Control::try_receive_body(int peer, std::uint64_t channel, Deadline until) {
  if (auto text = try_receive(peer, channel, until)) {
    return Body{std::move(*text), {}};
  }
  return std::nullopt;
}

std::string Control::receive(int peer, std::uint64_t channel, Deadline deadline, void (*poll)()) {
  constexpr std::chrono::milliseconds kPoll(50);
  do {
    if (auto body = try_receive(peer, channel, poll == nullptr ? deadline : std::min(deadline, Clock::now() + kPoll))) {
      return std::move(*body);
    }
    if (poll != nullptr) {
      poll();
    }
  } while (Clock::now() < deadline);
  throw Error(ErrorKind::kTimedOut, str("rank ", rank(), " waited too long for a message from rank ", peer),
              {rank(), peer, -1, "receive"});
}

std::string departure_text(int peer, std::string_view why) {
  return str("rank ", peer, " has left the job", why.empty() ? "" : ": ", why);
}

std::string Control::departure_of(int peer) const { return departure_text(peer, why_left(peer)); }

std::vector<std::string> Control::exchange(const std::vector<int>& ranks, std::uint64_t channel,
                                           const std::string& body, Deadline deadline, void (*poll)()) {
  for (int peer : ranks) {
    if (peer != rank()) {
      send(peer, channel, body);
    }
  }
  std::vector<std::string> all;
  all.reserve(ranks.size());
  for (int peer : ranks) {
    all.push_back(peer == rank() ? body : receive(peer, channel, deadline, poll));
  }
  return all;
}

void Control::let_all_find_out(const std::vector<int>& ranks, std::uint64_t channel, void (*poll)()) {
  constexpr std::chrono::seconds kMost(5);
  try {
    (void)exchange(ranks, channel, "", Clock::now() + kMost, poll);
  } catch (const Error&) {
    // One is slow, or is gone. What was found is to be said all the same.
  }
}

std::shared_ptr<Control> make_solo_control() { return std::make_shared<SoloControl>(); }

}  // namespace hpcomm
