// Who sits where: hosts, and seats on each.
#include <algorithm>
#include <charconv>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "base/hash.h"
#include "comm/hierarchical/hierarchical_communicator.h"

namespace hpcomm {

Seating::Seating(const std::vector<int>& host_of) {
  std::map<int, std::size_t> numbers;
  for (std::size_t member = 0; member < host_of.size(); ++member) {
    const std::size_t host = numbers.try_emplace(host_of[member], by_host_.size()).first->second;
    if (host == by_host_.size()) {
      by_host_.emplace_back();
    }
    places_.push_back({host, by_host_[host].size()});
    by_host_[host].push_back(static_cast<int>(member));
  }
}

bool Seating::has_levels() const noexcept {
  return hosts() > 1 && seats() > 1 && std::all_of(by_host_.begin(), by_host_.end(), [this](const auto& members) {
           return members.size() == seats();
         });
}

std::vector<int> Seating::of_seat(std::size_t seat) const {
  std::vector<int> members;
  for (const std::vector<int>& host : by_host_) {
    members.push_back(host[seat]);
  }
  return members;
}

Seating ask_seating(const CommunicatorConfig& config, int host) {
  const std::uint64_t channel = Fingerprint().add(config.name).add("seating").value();
  const std::vector<std::string> answers = config.control->exchange(config.ranks, channel, std::to_string(host),
                                                                    deadline_after(config.timeout), config.poll);
  std::vector<int> host_of;
  for (std::size_t member = 0; member < answers.size(); ++member) {
    const std::string& text = answers[member];
    int number = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size()) {
      throw Error(ErrorKind::kProtocol,
                  str("communicator ", config.name, ": rank ", config.ranks[member], " sent no number of its host"));
    }
    host_of.push_back(number);
  }
  return Seating(host_of);
}

namespace {

// `members` of `config`'s group, this one among them; no other group of it has this `name`.
CommunicatorConfig level_config(const CommunicatorConfig& config, const std::vector<int>& members,
                                const std::string& name) {
  CommunicatorConfig level = config;
  level.name = str(config.name, "/", name);
  level.ranks.clear();
  for (std::size_t i = 0; i < members.size(); ++i) {
    level.ranks.push_back(config.ranks[static_cast<std::size_t>(members[i])]);
    if (members[i] == config.rank) {
      level.rank = static_cast<int>(i);
    }
  }
  return level;
}

std::vector<int> all_of(const CommunicatorConfig& config) {
  std::vector<int> members(config.ranks.size());
  std::iota(members.begin(), members.end(), 0);
  return members;
}

}  // namespace

LevelConfigs::LevelConfigs(const CommunicatorConfig& config, const Seating& seating)
    : inside(
          level_config(config, seating.of_host(seating.host(config.rank)), str("inside", seating.host(config.rank)))),
      between(
          level_config(config, seating.of_seat(seating.seat(config.rank)), str("between", seating.seat(config.rank)))),
      whole(level_config(config, all_of(config), "whole")) {
  inside.lane += " inside the host";
  between.lane += " between hosts";
  // Collectives are compared between all ranks, before any level begins.
  inside.check = between.check = false;
}

}  // namespace hpcomm
