// The transport of CPU ranks on several hosts, several on each: shared memory inside a host, another one between hosts.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace hpcomm {

// The members of a group by their host. A member has a host and a seat there.
class Seating {
 public:
  // `host_of[i]` is equal for members of one host. Hosts are in the order of their first members, seats in that of the
  // group.
  explicit Seating(const std::vector<int>& host_of);

  // Several hosts, with equally many members, and several of them: where two levels are less work than one.
  [[nodiscard]] bool has_levels() const noexcept;
  [[nodiscard]] std::size_t hosts() const noexcept { return by_host_.size(); }
  [[nodiscard]] std::size_t seats() const noexcept { return by_host_.front().size(); }
  [[nodiscard]] std::size_t host(int member) const { return places_[static_cast<std::size_t>(member)].host; }
  [[nodiscard]] std::size_t seat(int member) const { return places_[static_cast<std::size_t>(member)].seat; }
  // The member on this seat of this host.
  [[nodiscard]] int member(std::size_t host, std::size_t seat) const { return by_host_[host][seat]; }
  // All members of a host, and those of all hosts on one seat.
  [[nodiscard]] const std::vector<int>& of_host(std::size_t host) const { return by_host_[host]; }
  [[nodiscard]] std::vector<int> of_seat(std::size_t seat) const;

 private:
  struct Place {
    std::size_t host;
    std::size_t seat;
  };
  std::vector<std::vector<int>> by_host_;
  std::vector<Place> places_;
};

// Asks all members which of them share a host: those with an equal `host`, a number. Collective over `config.ranks`,
// through Control. Throws kTimedOut or the job's failure.
[[nodiscard]] Seating ask_seating(const CommunicatorConfig& config, int host);

// What one is made of, all on its stream: operations run where it runs them.
struct Levels {
  std::shared_ptr<Communicator> inside;   // the members of this host, by seat
  std::shared_ptr<Communicator> between;  // those on this seat, by host
  std::shared_ptr<Communicator> whole;    // the whole group: messages and what has no levels
};
using MakeChild = std::function<std::shared_ptr<Communicator>(CommunicatorConfig child)>;

// The configurations of the levels of this member.
struct LevelConfigs {
  LevelConfigs(const CommunicatorConfig& config, const Seating& seating);
  CommunicatorConfig inside;
  CommunicatorConfig between;
  CommunicatorConfig whole;
};

// `make_child` serves subgroup(). `seating` has levels.
//
// Sums are rounded once more than on one level, as each host's is one of their numbers; all ranks have the same bits.
[[nodiscard]] std::shared_ptr<Communicator> make_hierarchical_communicator(CommunicatorConfig config, Seating seating,
                                                                           Levels levels, MakeChild make_child);

}  // namespace hpcomm
