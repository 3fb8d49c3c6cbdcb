// What ends of itself when a group or the process ends.
#include "torch/backend_job.h"

#include <algorithm>

namespace hpcomm {

bool GroupOperations::end_unattended(Deadline patience, void (*poll)()) const {
  constexpr auto kLook = std::chrono::milliseconds(20);  // for a thread that begins to wait meanwhile
  const auto group = communicator.lock();
  if (group == nullptr || group->forked()) {
    return true;
  }
  const Event issued = group->stream().record();
  while (*inside == 0 && Clock::now() < patience) {
    poll();
    const Deadline until = std::min(patience, Clock::now() + kLook);
    if (issued.wait_until(until) && group->idle_until(until)) {
      return true;
    }
  }
  return false;
}

void BackendJob::settle(void (*poll)()) const {
  std::unique_lock lock(mutex_);
  const std::vector<GroupOperations> groups = groups_;
  lock.unlock();  // groups may end meanwhile
  const Deadline patience = Clock::now() + kShutdownWait;
  for (const GroupOperations& group : groups) {
    (void)group.end_unattended(patience, poll);
  }
}

void BackendJob::end_at_exit() noexcept {
  std::unique_lock lock(mutex_);
  const std::vector<GroupOperations> groups = groups_;
  lock.unlock();
  end();
  for (const GroupOperations& group : groups) {
    const auto communicator = group.communicator.lock();
    try {
      if (communicator != nullptr && communicator->idle_until({})) {
        communicator->close();
      }
    } catch (const std::exception&) {  // within an operation, which fails by itself
    }
  }
}

}  // namespace hpcomm
