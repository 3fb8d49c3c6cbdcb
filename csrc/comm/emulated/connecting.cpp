// Halves meet through Control, whose sends never block.
#include "comm/emulated/connecting.h"

#include <algorithm>
#include <iterator>

#include "base/hash.h"
#include "comm/communicator.h"

namespace hpcomm {

thread_local std::map<const Connecting*, std::vector<Connecting::Half>*> Connecting::collected_;

std::uint64_t Connecting::channel(const char* says, int from, int to) const {
  Fingerprint hash;
  hash.add(communicator_.name()).add("connecting").add(says);
  return hash.add_int(static_cast<std::uint64_t>(from)).add_int(static_cast<std::uint64_t>(to)).value();
}

void Connecting::begin(std::vector<Half>& halves, const ErrorContext& what, int peer, std::uint64_t mine,
                       std::uint64_t theirs) {
  const int other = communicator_.ranks()[static_cast<std::size_t>(peer)];
  communicator_.control().send(other, mine, "");
  halves.push_back({what, other, theirs});
}

void Connecting::send(std::vector<Half>& halves, const ErrorContext& what, int to) {
  const std::lock_guard lock(mutex_);
  const int from = communicator_.rank();
  if (known_.emplace(from, to).second) {
    begin(halves, what, to, channel("send", from, to), channel("recv", from, to));
  }
}

void Connecting::recv(std::vector<Half>& halves, const ErrorContext& what, int from) {
  const std::lock_guard lock(mutex_);
  const int to = communicator_.rank();
  if (known_.emplace(from, to).second) {
    begin(halves, what, from, channel("recv", from, to), channel("send", from, to));
  }
}

void Connecting::collective(std::vector<Half>& halves, const ErrorContext& what) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(had_collective_, true)) {
    return;
  }
  const int self = communicator_.rank();
  for (int peer = 0; peer < communicator_.size(); ++peer) {
    if (peer != self) {
      begin(halves, what, peer, channel("all", self, peer), channel("all", peer, self));
    }
  }
}

std::vector<Connecting::Half> Connecting::collect(const std::function<void()>& issue) {
  std::vector<Half> halves;
  std::vector<Half>* const outer = std::exchange(collected_[this], &halves);
  const auto leave = [&] {
    collected_[this] = outer;
    if (outer == nullptr) {
      collected_.erase(this);
    }
  };
  try {
    issue();
  } catch (...) {
    leave();
    throw;
  }
  leave();
  return halves;
}

void Connecting::wait(std::vector<Half> halves, const Wait& how) {
  if (const auto found = collected_.find(this); found != collected_.end()) {
    std::move(halves.begin(), halves.end(), std::back_inserter(*found->second));
    return;
  }
  for (const Half& half : halves) {
    while (!has_come(half, std::min(how.deadline, Clock::now() + kWaitSlice))) {
      if (how.interrupted) {
        return;
      }
      if (Clock::now() >= how.deadline) {
        throw Error(ErrorKind::kTimedOut,
                    str(half.what.operation, " #", half.what.sequence, " on lane ", communicator_.lane(),
                        " is the first of its kind: the host waits until rank ", half.peer,
                        " has issued its half, because NCCL connects ranks in the call that issues; all of them have ",
                        "to issue such operations in one order, or in one group"),
                    half.what);
      }
      if (how.poll != nullptr) {
        how.poll();
      }
    }
  }
}

bool Connecting::has_come(const Half& half, Deadline until) const {
  try {
    return communicator_.control().try_receive(half.peer, half.channel, until).has_value();
  } catch (const Error&) {
    return true;  // the peer is gone: the operation itself tells
  }
}

}  // namespace hpcomm
