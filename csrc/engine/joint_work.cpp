// Waiting for several operations, and for the news that the other end does not want them.
#include "engine/joint_work.h"

#include <algorithm>

namespace hpcomm {

namespace {

constexpr auto kRefusalPoll = std::chrono::milliseconds(20);

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
  } catch (const Error&) {
    ask();  // a receiver that refused it may have left since: that tells more
    throw;
  }
}

void JointWork::check() const {
  try {
    for (const WorkPtr& part : parts_) {
      part->check();
    }
  } catch (const Error&) {
    ask();
    throw;
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
