// Two rounds over Control: who offers what, then who could read whom.
#include "comm/shm/neighbourhood.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "comm/shm/greeting.h"
#include "control/channels.h"

namespace hpcomm::shm {

namespace {

using control::kMeetChannel;
using control::kReachChannel;
constexpr std::uint64_t kPage = 0;        // names that a courier offers: the page to try,
constexpr std::uint64_t kFirstArena = 1;  // the arena's segments, and groups' segments by hash
// What ranks tell each other of how far they reach.
constexpr char kOutOfReach = '0';
constexpr char kShares = '1';
constexpr char kAttaches = '2';                            // shares, and reads other memory of that process as well
constexpr std::size_t kReadAtOnce = std::size_t{1} << 30;  // Linux reads 2 GB less a page in a call
constexpr auto kLook = std::chrono::milliseconds(50);
// Between the end of a process and what Control says of it.
constexpr auto kNews = std::chrono::milliseconds(200);

std::uint64_t hash_of(const std::string& name) {
  Fingerprint hash;
  return hash.add("shm").add(name).value() | (std::uint64_t{1} << 63);
}

std::vector<int> everybody(int size) {
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r) {
    ranks.push_back(r);
  }
  return ranks;
}

}  // namespace

Neighbourhood::Neighbourhood(std::shared_ptr<Control> control, Attach attach)
    : control_(std::move(control)), attach_(attach) {
  try {
    courier_ = std::make_shared<Courier>();
  } catch (const Error& error) {
    obstacle_ = error.what();
  }
  arena_ = std::make_unique<Arena>([courier = courier_](std::uint32_t index, const Segment& segment) {
    if (courier != nullptr) {
      courier->publish(kFirstArena + index, segment.descriptor());
    }
  });
}

std::shared_ptr<Neighbourhood> Neighbourhood::discover(std::shared_ptr<Control> control, Deadline deadline,
                                                       const std::string& host, const std::vector<int>& members,
                                                       Attach attach, void (*poll)()) {
  const auto made = std::shared_ptr<Neighbourhood>(new Neighbourhood(std::move(control), attach));
  made->meet(host, members.empty() ? everybody(made->control_->size()) : members, deadline, poll);
  return made;
}

void Neighbourhood::meet(const std::string& host, const std::vector<int>& all, Deadline deadline, void (*poll)()) {
  const int self = control_->rank();
  Greeting mine = Greeting::from_here(host);
  mine.page = random_key_word();
  std::shared_ptr<Segment> offered;
  if (obstacle_.empty()) {
    try {
      offered = Segment::create("a page that neighbours try to read", kPageBytes);
      std::memcpy(offered->data(), mine.page.data(), mine.page.size());
      courier_->publish(kPage, offered->descriptor());
    } catch (const Error& error) {
      obstacle_ = error.what();
    }
  }
  if (courier_ != nullptr) {
    mine.courier = courier_->address();
    mine.key_word = courier_->key_word();
  }
  mine.obstacle = obstacle_;
  mine.process = attach_ == Attach::kNever ? 0 : ::getpid();
  mine.mark_address = reinterpret_cast<std::uintptr_t>(mark_.data());
  mine.mark = mark_;
  std::vector<Greeting> greetings;
  for (const std::string& body : control_->exchange(all, kMeetChannel, mine.encode(), deadline, poll)) {
    try {
      greetings.push_back(Greeting::decode(body));
    } catch (const Error& error) {
      throw Error(error.kind(), str("rank ", all[greetings.size()], " ", error.what()));
    }
  }
  job_.resize(static_cast<std::size_t>(control_->size()));
  for (Neighbour& neighbour : job_) {
    neighbour.obstacle = "the job has no such rank";
  }
  std::string reach(all.size(), '0');  // as greetings, by place among the ranks
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Greeting& its = greetings[i];
    const int r = all[i];
    Neighbour& neighbour = job_[static_cast<std::size_t>(r)];
    neighbour.address = its.courier;
    neighbour.key_word = its.key_word;
    neighbour.process = its.process;
    neighbour.mark_address = its.mark_address;
    neighbour.mark = its.mark;
    if (its.boot_id != mine.boot_id) {
      neighbour.obstacle = "it runs on another host";
    } else if (its.host != host) {
      neighbour.obstacle = str("HPCOMM_HOST is '", its.host, "' there and '", host, "' here");
    } else if (its.network != mine.network) {
      neighbour.obstacle = "it runs in another network namespace, that of a container perhaps";
    } else {
      neighbour.is_near = true;
      neighbour.obstacle = !obstacle_.empty()      ? str("here: ", obstacle_)
                           : !its.obstacle.empty() ? str("there: ", its.obstacle)
                                                   : try_to_read(r, its.page, {deadline, nullptr, nullptr, poll});
    }
    reach[i] = !neighbour.obstacle.empty() && r != self ? kOutOfReach
               : r != self && attaches_to(neighbour)    ? kAttaches
                                                        : kShares;
  }
  const std::vector<std::string> reaches = control_->exchange(all, kReachChannel, reach, deadline, poll);
  // A neighbourhood is a set of ranks in which everybody reads everybody and nobody reads more: the same on all of
  // them.
  const auto mutual = [&reaches](std::size_t a) {
    std::string row = reaches[a];
    for (std::size_t b = 0; b < row.size(); ++b) {
      const bool both = reaches[b].size() == row.size() && row[b] != kOutOfReach && reaches[b][a] != kOutOfReach;
      row[b] = both ? kShares : kOutOfReach;
    }
    return row;
  };
  const auto own_place = static_cast<std::size_t>(std::find(all.begin(), all.end(), self) - all.begin());
  const std::string own_row = mutual(own_place);
  std::vector<bool> usable;
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::string& obstacle = job_[static_cast<std::size_t>(all[i])].obstacle;
    if (all[i] == self || (own_row[i] == kShares && mutual(i) == own_row)) {
      ranks_.push_back(all[i]);
      job_[static_cast<std::size_t>(all[i])].reads_us = reaches[i][own_place] == kAttaches;
      const std::string& cores = greetings[i].cores;
      one_group_ = one_group_ && greetings[i].scheduler_group == mine.scheduler_group;
      usable.resize(std::max(usable.size(), cores.size()));
      for (std::size_t core = 0; core < cores.size(); ++core) {
        usable[core] = usable[core] || cores[core] == '1';
      }
    } else if (obstacle.empty()) {
      obstacle = "memory is not shared both ways between all ranks of its host";
    }
  }
  cores_ = static_cast<std::size_t>(std::count(usable.begin(), usable.end(), true));
  if (courier_ != nullptr) {
    courier_->withdraw(kPage);
  }
}

std::string Neighbourhood::try_to_read(int rank, const KeyWord& page, const Patience& patience) const {
  try {
    const auto segment = Segment::adopt(fetch(rank, kPage, patience));
    const bool same = segment->size() >= page.size() && std::memcmp(segment->data(), page.data(), page.size()) == 0;
    return same ? "" : "its memory shows other contents here";
  } catch (const Error& error) {
    control_->check();  // a rank that is gone is no obstacle
    return error.what();
  }
}

bool Neighbourhood::contains(const std::vector<int>& ranks) const {
  return std::all_of(ranks.begin(), ranks.end(),
                     [this](int rank) { return std::binary_search(ranks_.begin(), ranks_.end(), rank); });
}

std::string Neighbourhood::why_not(int rank) const {
  HPCOMM_REQUIRE(rank >= 0 && static_cast<std::size_t>(rank) < job_.size(), "rank ", rank, " of ", job_.size());
  return contains({rank}) ? "" : job_[static_cast<std::size_t>(rank)].obstacle;
}

int Neighbourhood::missing(const std::vector<int>& ranks) const {
  const auto found = std::find_if(ranks.begin(), ranks.end(), [this](int rank) {
    return !contains({rank}) && job_.at(static_cast<std::size_t>(rank)).is_near;
  });
  return found != ranks.end() ? *found : -1;
}

std::shared_ptr<Segment> Neighbourhood::share(const std::string& name, const std::vector<int>& members,
                                              std::size_t bytes, Deadline deadline, void (*poll)()) {
  HPCOMM_REQUIRE(!members.empty() && contains(members), "these ranks do not share memory");
  const std::uint64_t key = hash_of(name);
  const int leader = members.front();
  const int self = control_->rank();
  const auto hear = [&](int rank) { return control_->receive(rank, key, deadline, poll); };
  const auto tell = [&](const std::string& words) {
    for (const int member : members) {
      if (member != leader) {
        control_->send(member, key, words);
      }
    }
  };
  // What a rank cannot do is told as words, empty ones where all is well. The leader's come first; then each member
  // tells the leader, who tells all what becomes of it: a member that went another way alone would be waited for.
  std::shared_ptr<Segment> segment;
  std::string trouble;
  std::exception_ptr own;
  const auto attempt = [&](const auto& step) {
    try {
      step();
    } catch (const Error& error) {
      trouble = str("rank ", self, ": ", error.what());
      own = std::current_exception();
    }
  };
  if (self == leader) {
    attempt([&] {
      segment = Segment::create(name, bytes);
      courier_->publish(key, segment->descriptor());
    });
    // Also where a wait below ends by an error: the memory would stay for as long as the neighbourhood.
    const std::shared_ptr<const void> offered(nullptr, [this, key](const void*) { courier_->withdraw(key); });
    tell(trouble);
    if (trouble.empty()) {
      for (const int member : members) {
        const std::string heard = member != leader ? hear(member) : "";
        trouble = trouble.empty() ? heard : trouble;
      }
      tell(trouble);
    }
  } else {
    trouble = hear(leader);
    if (trouble.empty()) {
      attempt([&] { segment = adopt(name, leader, bytes, {deadline, nullptr, nullptr, poll}); });
      control_->send(leader, key, trouble);
      trouble = hear(leader);
    }
  }
  if (own != nullptr) {
    std::rethrow_exception(own);
  }
  if (!trouble.empty()) {
    throw Error(ErrorKind::kTransport, trouble);
  }
  return segment;
}

std::shared_ptr<Segment> Neighbourhood::adopt(const std::string& name, int leader, std::size_t bytes,
                                              const Patience& patience) const {
  auto segment = Segment::adopt(fetch(leader, hash_of(name), patience));
  if (segment->size() < bytes) {
    throw Error(ErrorKind::kSchemaMismatch,
                str(name, ": rank ", leader, " shares ", segment->size(), " bytes, this rank expects ", bytes,
                    "; do all ranks run one version?"));
  }
  return segment;
}

void Neighbourhood::park(Keepalive memory) {
  std::lock_guard lock(parked_mutex_);
  parked_.push_back(std::move(memory));
}

char* Neighbourhood::map(int rank, const Location& location, std::size_t bytes, const Patience& patience) {
  return hold(rank, location, bytes, patience).get();
}

std::shared_ptr<char> Neighbourhood::hold(int rank, const Location& location, std::size_t bytes,
                                          const Patience& patience) {
  auto memory = look_up(rank, location, bytes, patience);
  if (memory == nullptr) {
    throw late(rank);
  }
  return memory;
}

char* Neighbourhood::find(int rank, const Location& location, std::size_t bytes, const Patience& patience) {
  return look_up(rank, location, bytes, patience).get();
}

std::shared_ptr<char> Neighbourhood::look_up(int rank, const Location& location, std::size_t bytes,
                                             const Patience& patience) {
  HPCOMM_ASSERT(rank >= 0 && static_cast<std::size_t>(rank) < job_.size(), "rank ", rank);
  std::shared_ptr<Segment> segment;
  try {
    segment = segment_of(rank, location.segment, patience);
  } catch (const Error&) {
    require_alive(rank, patience.deadline);
    require_stays(rank);
    throw;
  }
  if (segment == nullptr) {
    return nullptr;
  }
  if (location.offset > segment->size() || bytes > segment->size() - location.offset) {
    throw Error(ErrorKind::kProtocol, str("rank ", rank, " named ", bytes, " bytes that are not in its arena"));
  }
  return {segment, segment->data() + location.offset};
}

bool Neighbourhood::is_read_by(int rank) const { return job_.at(static_cast<std::size_t>(rank)).reads_us; }

bool Neighbourhood::read(int rank, std::uint64_t address, char* target, std::size_t bytes, Deadline deadline) {
  const Neighbour& neighbour = job_.at(static_cast<std::size_t>(rank));
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t part = std::min(bytes - done, kReadAtOnce);
    const Copied copied = copy_from(neighbour, address + done, target + done, part);
    if (copied == Copied::kStranger) {
      require_alive(rank, deadline);
      require_stays(rank);
    }
    if (copied != Copied::kAll) {
      refusals_.fetch_add(1, std::memory_order_relaxed);
      return false;
    }
    done += part;
  }
  reads_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

bool Neighbourhood::attaches_to(const Neighbour& neighbour) const {
  char nothing = 0;
  return attach_ != Attach::kNever && neighbour.process != 0 &&
         copy_from(neighbour, neighbour.mark_address, &nothing, 1) == Copied::kAll;
}

Neighbourhood::Copied Neighbourhood::copy_from(const Neighbour& neighbour, std::uint64_t address, char* target,
                                               std::size_t bytes) {
  const auto there = [](std::uint64_t at) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(at)); };
  KeyWord mark{};
  const iovec local[] = {{mark.data(), mark.size()}, {target, bytes}};
  const iovec remote[] = {{there(neighbour.mark_address), mark.size()}, {there(address), bytes}};
  const ssize_t copied = ::process_vm_readv(neighbour.process, local, 2, remote, 2, 0);
  if (copied < static_cast<ssize_t>(mark.size())) {
    return copied < 0 && errno != ESRCH && errno != EFAULT ? Copied::kRefused : Copied::kStranger;
  }
  if (mark != neighbour.mark) {
    return Copied::kStranger;
  }
  return copied == static_cast<ssize_t>(mark.size() + bytes) ? Copied::kAll : Copied::kRefused;
}

template <typename Take, typename Wait>
bool Neighbourhood::await(int rank, const Patience& patience, const Take& take, const Wait& wait) const {
  for (;;) {
    if (take()) {
      return true;
    }
    const Deadline now = Clock::now();
    if (now >= patience.deadline) {
      return false;
    }
    wait(std::min(patience.deadline, now + kLook));
    control_->check();
    if (patience.interrupted != nullptr && patience.interrupted->load(std::memory_order_seq_cst)) {
      throw Error(ErrorKind::kClosed, "the communicator was aborted", {control_->rank(), rank, -1, ""});
    }
    const Gone gone = patience.gone == nullptr ? Gone::kNo : patience.gone->load(std::memory_order_seq_cst);
    if (gone != Gone::kNo) {
      throw Error(ErrorKind::kPeerError, str("rank ", rank, " ", to_string(gone)), {control_->rank(), rank, -1, ""});
    }
    if (patience.poll != nullptr) {
      patience.poll();
    }
  }
}

control::Fd Neighbourhood::fetch(int rank, std::uint64_t name, const Patience& patience) const {
  const Neighbour& neighbour = job_[static_cast<std::size_t>(rank)];
  Errand errand(neighbour.address, neighbour.key_word, name);
  control::Fd descriptor;
  const auto take = [&] {
    descriptor = errand.take();
    return descriptor.valid();
  };
  if (!await(rank, patience, take, [&errand](Deadline until) { errand.wait(until); })) {
    throw late(rank);
  }
  return descriptor;
}

// Others wait for the lock, so it is not held while a neighbour is waited for.
std::shared_ptr<Segment> Neighbourhood::segment_of(int rank, std::uint32_t index, const Patience& patience) {
  Neighbour& neighbour = job_[static_cast<std::size_t>(rank)];
  std::shared_ptr<Segment> segment;
  std::shared_ptr<Errand> errand;
  const auto take = [&] {
    const std::lock_guard lock(mutex_);
    if (const auto known = neighbour.segments.find(index); known != neighbour.segments.end()) {
      segment = known->second;
      return true;
    }
    std::shared_ptr<Errand>& mine = neighbour.errands[index];
    try {
      if (mine == nullptr) {
        mine = std::make_shared<Errand>(neighbour.address, neighbour.key_word, kFirstArena + index);
      }
      errand = mine;
      control::Fd descriptor = errand->take();
      if (!descriptor.valid()) {
        return false;
      }
      segment = Segment::adopt(std::move(descriptor));
    } catch (...) {
      neighbour.errands.erase(index);
      throw;
    }
    segment->close_descriptor();
    neighbour.segments.emplace(index, segment);
    neighbour.errands.erase(index);
    return true;
  };
  return await(rank, patience, take, [&errand](Deadline until) { errand->wait(until); }) ? segment : nullptr;
}

Error Neighbourhood::late(int rank) const {
  return {ErrorKind::kTimedOut,
          str("rank ", rank, " did not hand over its memory in time; is it running?"),
          {control_->rank(), rank, -1, ""}};
}

// A process that ended may be missed by its socket first.
void Neighbourhood::require_alive(int rank, Deadline deadline) const {
  for (const Deadline until = std::min(deadline, Clock::now() + kNews); Clock::now() < until;) {
    if (control_->has_left(rank) || control_->failure()) {
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  control_->check();
}

void Neighbourhood::require_stays(int rank) const {
  if (control_->has_left(rank)) {
    control_->check();  // it may have been lost
    throw Error(ErrorKind::kRankFailed, control_->departure_of(rank), {control_->rank(), rank, -1, ""});
  }
}

}  // namespace hpcomm::shm
