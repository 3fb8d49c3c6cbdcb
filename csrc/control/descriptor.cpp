// The list of all descriptors of Control in this process, which a handler closes in every forked child.
#include "control/descriptor.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "base/fork.h"

namespace hpcomm::control {

namespace {

struct Registry {
  std::mutex mutex;  // fork() holds it, so the child finds the list whole
  std::vector<int> open;
};

// Never destroyed: a Control may outlive the statics of this library.
Registry& registry() {
  static auto* const the_registry = new Registry;
  return *the_registry;
}

void before_fork() { registry().mutex.lock(); }

void after_fork_in_parent() { registry().mutex.unlock(); }

// Only what is allowed behind the fork of a process with threads: close() and memory that is there already.
void after_fork_in_child() {
  for (const int fd : registry().open) {
    (void)::close(fd);
  }
  registry().open.clear();
  registry().mutex.unlock();
}

}  // namespace

std::unique_lock<std::mutex> Fd::no_fork() {
  static const int registered = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  (void)registered;
  (void)fork_generation();  // counts from now on
  return std::unique_lock(registry().mutex);
}

Fd::Fd(int fd) : fd_(fd), generation_(fork_generation()) {
  if (fd >= 0) {
    registry().open.push_back(fd);
  }
}

Fd::~Fd() {
  if (fd_ < 0 || generation_ != fork_generation()) {
    return;  // the child of a fork has closed it already, and may use the number for something else
  }
  const std::lock_guard lock(registry().mutex);
  auto& open = registry().open;
  if (const auto found = std::find(open.begin(), open.end(), fd_); found != open.end()) {
    *found = open.back();
    open.pop_back();
  }
  (void)::close(fd_);
}

}  // namespace hpcomm::control
