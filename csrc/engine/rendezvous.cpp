// Ready and go, a Control message each: a word and the number of the message.
#include "engine/rendezvous.h"

#include <algorithm>

#include "base/hash.h"

namespace hpcomm {

namespace {

constexpr const char* kReady = "ready";
constexpr const char* kGo = "go";

std::string name(const ErrorContext& what) { return str(what.operation, " #", what.sequence); }

}  // namespace

Rendezvous::Rendezvous(const Communicator& communicator, int peer, std::uint64_t edge)
    : communicator_(communicator),
      control_(communicator.shared_control()),
      peer_(job_rank(communicator, peer)),
      // Ranks of the job: all edges have to count alike, whatever their communicators.
      decides_(job_rank(communicator, communicator.rank()) < peer_),
      channel_(Fingerprint().add("rendezvous").add_int(edge).value()) {}

void Rendezvous::meet(DeviceSlot::Place& place, const ErrorContext& what, Deadline deadline,
                      const std::function<void()>& check) const {
  const auto device_late = [&] {
    return Error(ErrorKind::kTimedOut, str(name(what), " waits for this rank's device behind ", place.behind()), what);
  };
  const auto peer_late = [&] {
    return Error(ErrorKind::kTimedOut,
                 str(name(what), " waits for rank ", peer_, ", which has not come to it: it has not ",
                     what.operation == "send" ? "asked for the message" : "got to sending it",
                     ", or an operation that it issued before has not ended. On a device that runs one operation at a ",
                     "time a collective must not stand between a send and the receipt that its peer waits for"),
                 what);
  };
  const auto take = [&](Deadline until) { return place.taken(until); };
  const auto reach = [&](Deadline until) { return place.reached(until); };
  const auto hear = [&](const char* word) {
    wait([&](Deadline until) { return has_come(word, what, until); }, deadline, check, peer_late);
  };
  const auto say = [&](const char* word) {
    in_words_of(communicator_, what, [&] { control_->send(peer_, channel_, str(word, ' ', what.sequence)); });
  };
  if (decides_) {
    hear(kReady);
    wait(take, deadline, check, device_late);
    say(kGo);
  } else {
    // Not before: a lower rank that heard it holds its device for this one's.
    wait(reach, deadline, check, device_late);
    say(kReady);
    hear(kGo);
    wait(take, deadline, check, device_late);
  }
}

void Rendezvous::wait(const Step& step, Deadline deadline, const std::function<void()>& check,
                      const std::function<Error()>& late) {
  while (!step(std::min(deadline, Clock::now() + kWaitSlice))) {
    check();
    if (Clock::now() >= deadline) {
      throw late();
    }
  }
}

bool Rendezvous::has_come(const std::string& word, const ErrorContext& what, Deadline until) const {
  const auto heard = in_words_of(communicator_, what, [&] { return control_->try_receive(peer_, channel_, until); });
  if (heard && *heard != str(word, ' ', what.sequence)) {
    throw Error(ErrorKind::kProtocol,
                str(name(what), ": rank ", peer_, " says '", *heard, "' where '", word, ' ', what.sequence, "' is due"),
                what);
  }
  return heard.has_value();
}

}  // namespace hpcomm
