// How the ranks of a job find each other: every rank connects to the lower ones and accepts the higher ones.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "control/socket.h"
#include "control/tcp_control.h"

namespace hpcomm {

namespace control {
namespace {

// Connections beyond one per rank that may be open without having greeted.
constexpr std::ptrdiff_t kMaxSilent = 64;

// A connection on which the greeting is still awaited.
struct Pending {
  Fd fd;
  int rank = -1;  // of a connection that we opened; -1 on one that we accepted
  std::string incoming;
  bool connecting = false;  // we opened it and it does not stand yet
};

class Rendezvous {
 public:
  Rendezvous(int listener, int rank, int size, const JobToken& token)
      : listener_(listener),
        rank_(rank),
        token_(token),
        open_(static_cast<std::size_t>(size)),
        surplus_(static_cast<std::size_t>(size)) {}

  std::shared_ptr<Control> run(const std::vector<std::string>& addresses, Deadline deadline) {
    for (int lower = 0; lower < rank_; ++lower) {
      Pending pending;
      pending.fd = start_connect(addresses[static_cast<std::size_t>(lower)]);
      pending.rank = lower;
      pending.connecting = true;
      pending_.push_back(std::move(pending));
    }
    while (missing() > 0) {
      if (Clock::now() >= deadline) {
        throw Error(ErrorKind::kTimedOut,
                    str("rank ", rank_, " did not hear from ", missing_ranks(),
                        " while the job was starting; see whether they run and can be reached"),
                    {rank_, -1, -1, "init"});
      }
      poll_once();
    }
    return std::make_shared<TcpControl>(rank_, std::move(open_), std::move(surplus_));
  }

 private:
  [[nodiscard]] std::size_t missing() const {
    return static_cast<std::size_t>(
               std::count_if(open_.begin(), open_.end(), [](const Fd& fd) { return !fd.valid(); })) -
           1;  // ourselves
  }

  [[nodiscard]] std::string missing_ranks() const {
    std::string names;
    for (std::size_t r = 0; r < open_.size(); ++r) {
      if (!open_[r].valid() && static_cast<int>(r) != rank_) {
        names += str(names.empty() ? "rank " : ", rank ", r);
      }
    }
    return names;
  }

  void poll_once() {
    std::vector<pollfd> fds{{listener_, POLLIN, 0}};
    for (const Pending& pending : pending_) {
      fds.push_back({pending.fd.get(), static_cast<short>(pending.connecting ? POLLOUT : POLLIN), 0});
    }
    (void)::poll(fds.data(), fds.size(), 50);
    std::vector<Pending> keep;
    for (std::size_t i = 0; i < pending_.size(); ++i) {
      if (fds[i + 1].revents == 0 || advance(pending_[i])) {
        keep.push_back(std::move(pending_[i]));
      }
    }
    pending_ = std::move(keep);
    while (true) {
      Fd fd = accept_one(listener_);
      if (!fd.valid()) {
        break;
      }
      Pending pending;
      pending.fd = std::move(fd);
      pending_.push_back(std::move(pending));
    }
    // Somebody who opens connections and says nothing must not use up our descriptors; our peers greet at once.
    const auto accepted = [](const Pending& pending) { return pending.rank < 0; };
    while (std::count_if(pending_.begin(), pending_.end(), accepted) > kMaxSilent + std::ssize(open_)) {
      const auto oldest = std::find_if(pending_.begin(), pending_.end(), accepted);
      (void)refuse(*oldest, "too many connections wait without a greeting");
      pending_.erase(oldest);
    }
  }

  // One step of one connection; false when it is settled or dropped.
  bool advance(Pending& pending) {
    if (pending.connecting) {
      if (const int error = connect_error(pending.fd.get()); error != 0) {
        throw Error(ErrorKind::kRankFailed,
                    str("rank ", rank_, " cannot reach rank ", pending.rank, ": ", std::strerror(error)),
                    {rank_, pending.rank, -1, "init"});
      }
      pending.connecting = false;
      greet(pending.fd.get());
      return true;
    }
    char chunk[4096];
    const ssize_t got = ::recv(pending.fd.get(), chunk, sizeof chunk, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
      return true;
    }
    if (got <= 0) {
      return refuse(pending, "it hung up");
    }
    pending.incoming.append(chunk, static_cast<std::size_t>(got));
    try {
      auto parsed = parse(pending.incoming);
      if (!parsed && pending.incoming.size() >= kPrefixBytes + kHelloBytes) {
        // Whoever has not proved to be ours does not fill our memory.
        return refuse(pending, "it announced more than a greeting");
      }
      return parsed ? settle(pending, *parsed) : true;
    } catch (const Error& error) {
      return refuse(pending, error.what());
    }
  }

  bool settle(Pending& pending, const Parsed& parsed) {
    if (parsed.frame.kind != FrameKind::kHello) {
      return refuse(pending, "it did not greet");
    }
    const Hello hello = parse_hello(parsed.frame.body);
    const bool expected = pending.rank >= 0 ? hello.rank == pending.rank
                                            : hello.rank > rank_ && hello.rank < static_cast<int>(open_.size());
    if (hello.token != token_ || !expected || open_[static_cast<std::size_t>(hello.rank)].valid()) {
      return refuse(pending, "it belongs to another job");
    }
    if (pending.rank < 0) {
      greet(pending.fd.get());
    }
    open_[static_cast<std::size_t>(hello.rank)] = std::move(pending.fd);
    surplus_[static_cast<std::size_t>(hello.rank)] = pending.incoming.substr(parsed.consumed);
    return false;
  }

  void greet(int fd) const {
    // A fresh socket takes 44 bytes; were it not so, the peer's time-out would name us.
    const std::string bytes = encode(FrameKind::kHello, 0, encode_hello({token_, rank_}));
    (void)!::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }

  // Somebody else's connection costs one line; a peer that hangs up is a failed rank.
  bool refuse(const Pending& pending, const std::string& why) const {
    if (pending.rank >= 0) {
      throw Error(ErrorKind::kRankFailed, str("rank ", pending.rank, " refused rank ", rank_, " at start: ", why),
                  {rank_, pending.rank, -1, "init"});
    }
    std::fprintf(stderr, "hpcomm: rank %d dropped a connection from %s: %s\n", rank_,
                 peer_name(pending.fd.get()).c_str(), why.c_str());
    return false;
  }

  int listener_;
  int rank_;
  JobToken token_;
  std::vector<Fd> open_;
  std::vector<std::string> surplus_;
  std::vector<Pending> pending_;
};

}  // namespace
}  // namespace control

ControlListener::ControlListener(const std::string& host, int rank, int size, control::JobToken token)
    : rank_(rank), size_(size), token_(token) {
  HPCOMM_REQUIRE(size >= 1 && rank >= 0 && rank < size, "rank ", rank, " of ", size);
  auto [fd, address] = control::listen_on(host, size + 16);
  address_ = std::move(address);
  fd_ = std::move(fd);
}

ControlListener::~ControlListener() = default;

std::shared_ptr<Control> ControlListener::connect(const std::vector<std::string>& addresses, Deadline deadline) {
  HPCOMM_REQUIRE(addresses.size() == static_cast<std::size_t>(size_), "one address per rank: ", size_, ", got ",
                 addresses.size());
  HPCOMM_REQUIRE(fd_.valid(), "a listener connects once");
  const control::Fd listener = std::move(fd_);
  if (size_ == 1) {
    return make_solo_control();
  }
  return control::Rendezvous(listener.get(), rank_, size_, token_).run(addresses, deadline);
}

}  // namespace hpcomm
