// Two rounds over Control: who offers what, then who could read whom.
#include "comm/shm/neighbourhood.h"

#include <sched.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
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
constexpr auto kPatience = std::chrono::seconds(5);
// Between the end of a process and what Control says of it.
constexpr auto kNews = std::chrono::milliseconds(200);

// Read once: later the process may open no more files.
const std::string& boot_id() {
  static const std::string& the = *new std::string([] {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string id;
    std::getline(file, id);
    return id;
  }());
  return the;
}

// Abstract sockets, by which neighbours hand memory to each other, do not leave it.
std::string network() {
  std::array<char, 64> name{};
  const ssize_t length = ::readlink("/proc/self/ns/net", name.data(), name.size());
  return {name.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0))};
}

// Of this process, as one '1' or '0' for each core of the host.
std::string allowed_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) {  // a host with more cores than the set has places
    return std::string(std::max(1U, std::thread::hardware_concurrency()), '1');
  }
  std::string cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    cores += CPU_ISSET(core, &allowed) ? '1' : '0';
  }
  return cores.substr(0, cores.find_last_of('1') + 1);
}

std::string text_of(const KeyWord& word) { return {word.begin(), word.end()}; }

// Length-prefixed fields: what is in them does not matter.
std::string join(const std::vector<std::string>& fields) {
  std::string body;
  for (const std::string& field : fields) {
    const auto length = static_cast<std::uint32_t>(field.size());
    body.append(reinterpret_cast<const char*>(&length), sizeof length).append(field);
  }
  return body;
}

std::vector<std::string> split(const std::string& body) {
  std::vector<std::string> fields;
  for (std::size_t at = 0; at < body.size();) {
    std::uint32_t length = 0;
    if (body.size() - at < sizeof length) {
      throw Error(ErrorKind::kProtocol, "a neighbour's greeting is cut short");
    }
    std::memcpy(&length, body.data() + at, sizeof length);
    at += sizeof length;
    if (body.size() - at < length) {
      throw Error(ErrorKind::kProtocol, "a neighbour's greeting is cut short");
    }
    fields.push_back(body.substr(at, length));
    at += length;
  }
  return fields;
}

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
  const std::string page = text_of(random_key_word());
  std::shared_ptr<Segment> offered;
  if (obstacle_.empty()) {
    try {
      offered = Segment::create("a page that neighbours try to read", kPageBytes);
      std::memcpy(offered->data(), page.data(), page.size());
      courier_->publish(kPage, offered->descriptor());
    } catch (const Error& error) {
      obstacle_ = error.what();
    }
  }
  const std::string greeting =
      join({boot_id(), host, courier_ ? courier_->address() : "", courier_ ? text_of(courier_->key_word()) : "", page,
            obstacle_, allowed_cores(), scheduler_group(), str(attach_ == Attach::kNever ? 0 : ::getpid()),
            str(reinterpret_cast<std::uintptr_t>(mark_.data())), text_of(mark_), network()});
  const std::vector<std::string> greetings = control_->exchange(all, kMeetChannel, greeting, deadline, poll);
  job_.resize(static_cast<std::size_t>(control_->size()));
  for (Neighbour& neighbour : job_) {
    neighbour.obstacle = "the job has no such rank";
  }
  std::string reach(all.size(), '0');  // as greetings, by place among the ranks
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::vector<std::string> fields = split(greetings[i]);
    const int r = all[i];
    Neighbour& neighbour = job_[static_cast<std::size_t>(r)];
    if (fields.size() != 12 || fields[10].size() != std::tuple_size_v<KeyWord> ||
        (fields[5].empty() && fields[3].size() != std::tuple_size_v<KeyWord>)) {
      throw Error(ErrorKind::kProtocol, str("rank ", r, " greets its neighbours in another version"));
    }
    neighbour.address = fields[2];
    neighbour.process = static_cast<pid_t>(std::strtol(fields[8].c_str(), nullptr, 10));
    neighbour.mark_address = std::strtoull(fields[9].c_str(), nullptr, 10);
    std::copy_n(fields[10].begin(), neighbour.mark.size(), neighbour.mark.begin());
    std::copy_n(fields[3].begin(), std::min(fields[3].size(), neighbour.key_word.size()), neighbour.key_word.begin());
    if (fields[0] != boot_id()) {
      neighbour.obstacle = "it runs on another host";
    } else if (fields[1] != host) {
      neighbour.obstacle = str("HPCOMM_HOST is '", fields[1], "' there and '", host, "' here");
    } else if (fields[11] != network()) {
      neighbour.obstacle = "it runs in another network namespace, that of a container perhaps";
    } else {
      neighbour.is_near = true;
      neighbour.obstacle = !obstacle_.empty() ? str("here: ", obstacle_)
                           : !fields[5].empty()
                               ? str("there: ", fields[5])
                               : try_to_read(neighbour, fields[4], std::min(deadline, Clock::now() + kPatience));
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
  const std::string mine = mutual(own_place);
  std::vector<bool> usable;
  const std::string own_group = scheduler_group();
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::string& obstacle = job_[static_cast<std::size_t>(all[i])].obstacle;
    if (all[i] == self || (mine[i] == kShares && mutual(i) == mine)) {
      ranks_.push_back(all[i]);
      job_[static_cast<std::size_t>(all[i])].reads_us = reaches[i][own_place] == kAttaches;
      const std::vector<std::string> fields = split(greetings[i]);
      const std::string& cores = fields[6];
      one_group_ = one_group_ && fields[7] == own_group;
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

std::string Neighbourhood::try_to_read(Neighbour& neighbour, const std::string& page, Deadline deadline) const {
  try {
    const auto segment = Segment::adopt(Courier::fetch(neighbour.address, neighbour.key_word, kPage, deadline));
    const bool same = segment->size() >= page.size() && std::memcmp(segment->data(), page.data(), page.size()) == 0;
    return same ? "" : "its memory shows other contents here";
  } catch (const Error& error) {
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
      attempt([&] { segment = adopt(name, leader, bytes, deadline); });
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
                                              Deadline deadline) const {
  const Neighbour& neighbour = job_[static_cast<std::size_t>(leader)];
  auto segment = Segment::adopt(Courier::fetch(neighbour.address, neighbour.key_word, hash_of(name), deadline));
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

char* Neighbourhood::map(int rank, const Location& location, std::size_t bytes, Deadline deadline) {
  return hold(rank, location, bytes, deadline).get();
}

std::shared_ptr<char> Neighbourhood::hold(int rank, const Location& location, std::size_t bytes, Deadline deadline) {
  HPCOMM_ASSERT(rank >= 0 && static_cast<std::size_t>(rank) < job_.size(), "rank ", rank);
  std::shared_ptr<Segment> segment;
  try {
    segment = segment_of(job_[static_cast<std::size_t>(rank)], location.segment, deadline);
  } catch (const Error&) {
    require_alive(rank, deadline);
    require_stays(rank);
    throw;
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

std::shared_ptr<Segment> Neighbourhood::segment_of(Neighbour& neighbour, std::uint32_t index, Deadline deadline) {
  std::lock_guard lock(mutex_);
  auto known = neighbour.segments.find(index);
  if (known == neighbour.segments.end()) {
    // Others wait for the lock meanwhile, so a neighbour that is stopped may not hold it for long.
    auto segment = Segment::adopt(Courier::fetch(neighbour.address, neighbour.key_word, kFirstArena + index,
                                                 std::min(deadline, Clock::now() + kPatience)));
    segment->close_descriptor();
    known = neighbour.segments.emplace(index, std::move(segment)).first;
  }
  return known->second;
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
    throw Error(ErrorKind::kRankFailed, str("rank ", rank, " has left the job"), {control_->rank(), rank, -1, "recv"});
  }
}

}  // namespace hpcomm::shm
