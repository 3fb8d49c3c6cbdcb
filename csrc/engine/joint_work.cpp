// Waiting for several operations, and for the news that the other end does not want them.
#include "engine/joint_work.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace hpcomm {

namespace {

constexpr auto kRefusalPoll = std::chrono::milliseconds(20);
constexpr auto kNews = std::chrono::milliseconds(200);

}  // namespace

bool JointWork::done() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const WorkPtr& part) { return part->done(); });
}

bool JointWork::wait_until(Deadline deadline) const {
  try {
    for (const WorkPtr& part : parts_) {
      while (!part->wait_until(std::min(deadline, Clock::now() + kRefusalPoll))) {
        ask();
        if (Clock::now() >= deadline) {
          return false;
        }
      }
    }
    return true;
  } catch (const Error& why) {
    ask_again(why);
    throw;
  }
}

void JointWork::check() const {
  try {
    for (const WorkPtr& part : parts_) {
      part->check();
    }
  } catch (const Error& why) {
    ask_again(why);
    throw;
  }
}

// A receiver that refused it may have left since: that tells more. A transport may hear of that first.
void JointWork::ask_again(const Error& why) const {
  const Deadline until = Clock::now() + (why.kind() == ErrorKind::kTransport ? kNews : std::chrono::milliseconds(0));
  for (ask(); refusal_ != nullptr && Clock::now() < until; ask()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void JointWork::ask() const {
  if (refusal_ == nullptr) {
    return;
  }
  if (ends_ == Ends::kWithLane) {
    refusal_->check_unmet(static_cast<std::uint64_t>(what_.sequence));
  } else {
    refusal_->check();
  }
}

}  // namespace hpcomm
