// How the ranks of a job find each other: every rank connects to the lower ones and accepts the higher ones.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "control/handshake.h"
#include "control/refusals.h"
#include "control/socket.h"
#include "control/tcp_control.h"

namespace hpcomm {

namespace control {
namespace {

// Connections beyond one per rank that may be open without a word, and as many that have said who they are and have not
// proved it: each for itself. To say it takes no secret, and a peer whose word is under way has said nothing yet.
constexpr std::ptrdiff_t kMaxUnproved = 64;
// New connections per round: a flood must not keep us from those we have.
constexpr int kAcceptsPerRound = 256;
// A greeting takes two round trips. Never more than a quarter of the time that the start has.
constexpr std::chrono::seconds kGreetingLimit{10};
// A peer that is flooded by strangers may have dropped us with them: we knock again.
constexpr int kAttempts = 3;

// A connection that is not greeted through yet.
struct Pending {
  Fd fd;
  Handshake handshake;
  Deadline drop_at = Deadline::max();
  int rank = -1;            // of a connection that we opened; -1 on one that we accepted
  int attempt = 1;          // at opening it
  bool connecting = false;  // we opened it and it does not stand yet
};

class Rendezvous {
 public:
  Rendezvous(int listener, int rank, int size, const JobToken& token, std::chrono::milliseconds heartbeat,
             const std::vector<std::string>& addresses, Deadline deadline, void (*poll)())
      : listener_(listener),
        rank_(rank),
        token_(token),
        heartbeat_(heartbeat),
        addresses_(addresses),
        deadline_(deadline),
        poll_(poll),
        greeting_limit_(std::min<Clock::duration>(kGreetingLimit, (deadline - Clock::now()) / 4)),
        peers_(static_cast<std::size_t>(size)),
        log_(rank) {}

  std::shared_ptr<Control> run() {
    try {
      for (int lower = 0; lower < rank_; ++lower) {
        if (expects(static_cast<std::size_t>(lower))) {
          pending_.push_back(open(lower, 1));
        }
      }
      while (!missing_ranks().empty()) {
        if (Clock::now() >= deadline_) {
          throw Error(ErrorKind::kTimedOut,
                      str("rank ", rank_, " did not hear from ", missing_ranks(), " while the job was starting",
                          where_missed(), "; see whether they run, and whether ports that the kernel chooses can be ",
                          "reached from host to host"),
                      {rank_, -1, -1, "init"});
        }
        poll_once();
        if (poll_ != nullptr) {
          poll_();
        }
      }
    } catch (const Error& error) {
      tell_others(error);
      throw;
    } catch (...) {
      tell_others(Error(ErrorKind::kClosed, "it was interrupted while the job was starting"));
      throw;
    }
    pending_.clear();  // strangers; what follows needs a descriptor as well
    std::vector<Fd> connections;
    std::vector<std::string> surplus;
    for (Peer& peer : peers_) {
      connections.push_back(std::move(peer.fd));
      surplus.push_back(std::move(peer.surplus));
    }
    return TcpControl::make(rank_, std::move(connections), std::move(surplus), heartbeat_);
  }

 private:
  // A rank that has greeted. It may be done with its start, and talk, or go.
  struct Peer {
    Fd fd;
    std::string surplus;      // what it said meanwhile, for TcpControl
    std::size_t scanned = 0;  // of it
    bool left = false;        // in order
  };

  // Whether the job has this rank, and it is another one.
  [[nodiscard]] bool expects(std::size_t r) const { return static_cast<int>(r) != rank_ && !addresses_[r].empty(); }

  [[nodiscard]] std::string missing_ranks() const {
    std::string names;
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      if (!peers_[r].fd.valid() && expects(r)) {
        names += str(names.empty() ? "rank " : ", rank ", r);
      }
    }
    return names;
  }

  // What was tried with those that are missing.
  [[nodiscard]] std::string where_missed() const {
    std::string unanswered;
    std::string silent;
    for (const Pending& pending : pending_) {
      if (pending.rank >= 0) {
        std::string& places = pending.connecting ? unanswered : silent;
        places += str(places.empty() ? "" : ", ", addresses_[static_cast<std::size_t>(pending.rank)]);
      }
    }
    bool awaits = false;
    for (std::size_t r = static_cast<std::size_t>(rank_) + 1; r < peers_.size(); ++r) {
      awaits = awaits || (expects(r) && !peers_[r].fd.valid());
    }
    return str(unanswered.empty() ? "" : ": nothing answers at " + unanswered,
               silent.empty() ? "" : ": no word from " + silent,
               awaits ? ": higher ranks come to " + addresses_[static_cast<std::size_t>(rank_)] : "");
  }

  [[nodiscard]] Pending open(int lower, int attempt) const {
    return {start_connect(addresses_[static_cast<std::size_t>(lower)]),
            Handshake::open(token_, rank_, lower),
            Deadline::max(),
            lower,
            attempt,
            true};
  }

  void poll_once() {
    std::vector<pollfd> fds{{listener_, POLLIN, 0}};
    for (const Pending& pending : pending_) {
      fds.push_back({pending.fd.get(), static_cast<short>(pending.connecting ? POLLOUT : POLLIN), 0});
    }
    std::vector<std::size_t> greeted;
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      if (peers_[r].fd.valid() && !peers_[r].left) {
        greeted.push_back(r);
        fds.push_back({peers_[r].fd.get(), POLLIN, 0});
      }
    }
    (void)::poll(fds.data(), fds.size(), 50);
    for (std::size_t i = 0; i < greeted.size(); ++i) {
      if (fds[1 + pending_.size() + i].revents != 0) {
        listen_to(greeted[i]);
      }
    }
    std::vector<Pending> keep;
    std::vector<Pending> youngest;  // of those who have said who they are, and had not before
    for (std::size_t i = 0; i < pending_.size(); ++i) {
      const bool was_silent = silent(pending_[i]);
      if (fds[i + 1].revents == 0 ? in_time(pending_[i]) : advance(pending_[i])) {
        (was_silent && !silent(pending_[i]) ? youngest : keep).push_back(std::move(pending_[i]));
      }
    }
    pending_ = std::move(keep);
    std::move(youngest.begin(), youngest.end(), std::back_inserter(pending_));
    accept_new();
    log_.tick();
  }

  void accept_new() {
    for (int i = 0; i < kAcceptsPerRound; ++i) {
      Fd fd = accept_one(listener_);
      if (!fd.valid()) {
        if (errno == EMFILE || errno == ENFILE) {
          make_room(errno);
        }
        break;
      }
      Pending pending{std::move(fd), Handshake::accept(token_, rank_, static_cast<int>(peers_.size())),
                      Clock::now() + greeting_limit_};
      // At once: a peer has greeted already, which tells it from the strangers that are dropped below.
      if (advance(pending)) {
        pending_.push_back(std::move(pending));
      }
    }
    // Who opens connections and goes no further must not use up our descriptors; our peers do at once.
    for (const auto kind : {silent, unproved}) {
      while (std::count_if(pending_.begin(), pending_.end(), kind) > kMaxUnproved + std::ssize(peers_)) {
        drop_oldest(kind);
      }
    }
  }

  // Of those that we accepted.
  static bool silent(const Pending& pending) { return pending.rank < 0 && !pending.handshake.greeted(); }
  static bool unproved(const Pending& pending) { return pending.rank < 0 && pending.handshake.greeted(); }

  // There is one of this kind.
  void drop_oldest(bool (*kind)(const Pending&)) {
    const auto oldest = std::find_if(pending_.begin(), pending_.end(), kind);
    (void)refuse(*oldest, Refusal::kTooMany,
                 str("too many connections wait without a ", kind == silent ? "greeting" : "proof"));
    pending_.erase(oldest);
  }

  // There is no descriptor for a connection that waits to be accepted. Strangers give theirs. Who has said who he is
  // may be a peer, and is done with it soon; but there are no more peers than ranks.
  void make_room(int error) {
    const auto count = [this](const auto& kind) { return std::count_if(pending_.begin(), pending_.end(), kind); };
    if (count(silent) > 0) {
      drop_oldest(silent);
    } else if (count(unproved) >= std::ssize(peers_)) {
      drop_oldest(unproved);
    } else if (count(unproved) == 0) {
      throw Error(ErrorKind::kTransport,
                  str("rank ", rank_, " can open no connection to ", missing_ranks(), ": ", std::strerror(error),
                      "; a rank needs a descriptor for each of the ", peers_.size(), " ranks: raise `ulimit -n`"),
                  {rank_, -1, -1, "init"});
    }
  }

  bool in_time(const Pending& pending) {
    return Clock::now() < pending.drop_at || refuse(pending, Refusal::kTooSlow, "its greeting takes too long");
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
      answer(pending);
      return true;
    }
    std::array<char, 4096> chunk;
    const ssize_t got = ::recv(pending.fd.get(), chunk.data(), chunk.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
      return in_time(pending);
    }
    if (got <= 0 && pending.rank >= 0 && pending.attempt < kAttempts) {
      pending = open(pending.rank, pending.attempt + 1);
      return true;
    }
    if (got <= 0) {
      return refuse(pending, Refusal::kHungUp, "it hung up");
    }
    try {
      pending.handshake.take({chunk.data(), static_cast<std::size_t>(got)});
    } catch (const Error& error) {
      return refuse(pending, error.kind() == ErrorKind::kProtocol ? Refusal::kNotOurs : Refusal::kOtherJob,
                    error.what());
    }
    if (pending.handshake.done()) {
      return settle(pending);
    }
    answer(pending);
    return in_time(pending);  // drop by drop is no way to stay
  }

  bool settle(Pending& pending) {
    const auto r = static_cast<std::size_t>(pending.handshake.peer());
    Peer& peer = peers_[r];
    if (!expects(r)) {
      return refuse(pending, Refusal::kOtherJob, str("it belongs to another job: there is no rank ", r, " here"));
    }
    if (peer.fd.valid()) {
      return refuse(pending, Refusal::kOtherJob, str("it belongs to another job: rank ", r, " is here already"));
    }
    answer(pending);
    if (heartbeat_.count() > 0) {
      watch_connection(pending.fd.get(), heartbeat_);
    }
    keep_in_cache(pending.fd.get());
    peer.fd = std::move(pending.fd);
    peer.surplus = pending.handshake.surplus();
    scan(r);
    return false;
  }

  static void answer(Pending& pending) {
    // A fresh socket takes the few bytes of a greeting; were it not so, the peer's time-out would name us.
    const std::string bytes = pending.handshake.output();
    (void)!::send(pending.fd.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  }

  // A rank that is here already: its end must not go unnoticed until our own deadline.
  void listen_to(std::size_t r) {
    std::array<char, 1 << 16> chunk;
    const ssize_t got = ::recv(peers_[r].fd.get(), chunk.data(), chunk.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
      return;
    }
    if (got <= 0) {
      throw Error(ErrorKind::kRankFailed,
                  str("rank ", r, " is gone: its process ended while the job was starting (seen by rank ", rank_, ")"),
                  {rank_, static_cast<int>(r), -1, "init"});
    }
    peers_[r].surplus.append(chunk.data(), static_cast<std::size_t>(got));
    scan(r);
  }

  void scan(std::size_t r) {
    Peer& peer = peers_[r];
    while (const auto parsed = next_frame(peer, r)) {
      peer.scanned += parsed->consumed;
      if (parsed->frame.kind == FrameKind::kAbort) {
        throw reported_error(parsed->frame, rank_, static_cast<int>(r));
      }
      peer.left = peer.left || parsed->frame.kind == FrameKind::kGoodbye;
    }
  }

  [[nodiscard]] std::optional<Parsed> next_frame(const Peer& peer, std::size_t r) const {
    try {
      return parse(std::span(peer.surplus).subspan(peer.scanned));
    } catch (const Error& error) {
      throw Error(ErrorKind::kRankFailed, str("rank ", r, " is gone: ", error.what(), " (seen by rank ", rank_, ")"),
                  {rank_, static_cast<int>(r), -1, "init"});
    }
  }

  // Those who wait as we did would otherwise see no more of it than the end of this process.
  void tell_others(const Error& error) const {
    const std::string bytes = encode_abort(error);
    for (const Peer& peer : peers_) {
      if (peer.fd.valid()) {
        (void)!::send(peer.fd.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      }
    }
  }

  // Somebody else's connection costs a line at most; a peer that hangs up is a failed rank.
  bool refuse(const Pending& pending, Refusal kind, const std::string& why) {
    if (pending.rank >= 0) {
      throw Error(ErrorKind::kRankFailed,
                  str("rank ", pending.rank, " refused rank ", rank_, " at start: ", why,
                      ". Do both run the same hpcomm, in the same job, with the same HPCOMM_SECRET if there is one?"),
                  {rank_, pending.rank, -1, "init"});
    }
    log_.add(kind, peer_name(pending.fd.get()), why);
    return false;
  }

  int listener_;
  int rank_;
  JobToken token_;
  std::chrono::milliseconds heartbeat_;
  const std::vector<std::string>& addresses_;
  Deadline deadline_;
  void (*poll_)();
  Clock::duration greeting_limit_;
  std::vector<Peer> peers_;
  std::vector<Pending> pending_;
  RefusalLog log_;
};

}  // namespace
}  // namespace control

ControlListener::ControlListener(const std::string& host, int rank, int size, control::JobToken token)
    : rank_(rank), size_(size), token_(token) {
  HPCOMM_REQUIRE(size >= 1 && rank >= 0 && rank < size, "rank ", rank, " of ", size);
  auto [fd, address] =
      control::listen_on(host, size + 1024);  // a flood of strangers must not delay our peers by lost SYNs
  address_ = std::move(address);
  fd_ = std::move(fd);
}

ControlListener::~ControlListener() = default;

std::shared_ptr<Control> ControlListener::connect(const std::vector<std::string>& addresses, Deadline deadline,
                                                  std::chrono::milliseconds heartbeat, void (*poll)()) {
  HPCOMM_REQUIRE(addresses.size() == static_cast<std::size_t>(size_), "one address per rank: ", size_, ", got ",
                 addresses.size());
  HPCOMM_REQUIRE(fd_.valid(), "a listener connects once");
  const control::Fd listener = std::move(fd_);
  if (size_ == 1) {
    return make_solo_control();
  }
  return control::Rendezvous(listener.get(), rank_, size_, token_, heartbeat, addresses, deadline, poll).run();
}

}  // namespace hpcomm
