// Call sites, what tests ask for, and what the library says of itself.
#include "native/fake/nccl/host.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace fake_nccl {

namespace {

struct Calls {
  std::mutex mutex;
  Rules rules;
  std::map<std::string, std::uint64_t> counts;
  std::vector<std::string> history;
  std::vector<std::string> violations;
  std::string failing;
  std::uint64_t fail_in = 0;  // 0: never
  ncclResult_t failure = ncclSuccess;
};

Calls& calls_made() {
  static Calls& the = *new Calls;
  return the;
}

}  // namespace

Host& host() {
  static Host& the = *new Host;
  return the;
}

Turnstile& turnstile(int device) {
  static Turnstile* all = new Turnstile[64];
  return all[device];
}

void violation(const std::string& what) {
  Calls& made = calls_made();
  const std::lock_guard lock(made.mutex);
  made.violations.push_back(what);
}

ncclResult_t enter(const char* function, bool quiet) {
  Calls& made = calls_made();
  const std::lock_guard lock(made.mutex);
  ++made.counts[function];
  if (quiet) {
    return ncclSuccess;
  }
  ++made.counts[""];
  if (made.history.size() < 100000) {
    made.history.emplace_back(function);
  }
  if (made.fail_in > 0 && (made.failing.empty() || made.failing == function) && --made.fail_in == 0) {
    return made.failure;
  }
  return ncclSuccess;
}

void reset(const Rules& wanted) {
  {
    Host& h = host();
    const std::lock_guard lock(h.mutex);
    for (const auto& comm : h.comms) {
      comm->given_up->store(true);
      comm->dead = true;
    }
    h.meetings.clear();
    h.allocations.clear();
    h.operators.clear();
    h.largest_group = 0;
    h.averages = 0;
    h.registrations = 0;
    h.launch_order.reset();
  }
  Calls& made = calls_made();
  const std::lock_guard lock(made.mutex);
  made.rules = wanted;
  made.counts.clear();
  made.history.clear();
  made.violations.clear();
  made.fail_in = 0;
}

bool launch_order_of_environment() {
  Host& h = host();
  const std::lock_guard lock(h.mutex);
  if (!h.launch_order) {
    const char* order = std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    h.launch_order = order != nullptr && std::atoi(order) != 0;
  }
  return *h.launch_order;
}

void use_elsewhere() { (void)launch_order_of_environment(); }

const Rules& rules() { return calls_made().rules; }

void let_aborts_return() {
  const std::lock_guard lock(host().mutex);  // under which an abort looks at it
  calls_made().rules.abort_hangs = false;
}

std::uint64_t calls(const std::string& function) {
  const std::lock_guard lock(calls_made().mutex);
  return calls_made().counts[function];
}

std::vector<std::string> history() {
  const std::lock_guard lock(calls_made().mutex);
  return calls_made().history;
}

void fail(const std::string& function, std::uint64_t n, int result) {
  Calls& made = calls_made();
  const std::lock_guard lock(made.mutex);
  made.failing = function;
  made.fail_in = n;
  made.failure = static_cast<ncclResult_t>(result);
}

bool failure_waits() {
  const std::lock_guard lock(calls_made().mutex);
  return calls_made().fail_in > 0;
}

void break_communicators(int device, int result) {
  const std::lock_guard lock(host().mutex);
  for (const auto& comm : host().comms) {
    if (comm->device == device && !comm->dead) {
      comm->error = result;
    }
  }
}

void break_last_communicator(int device, int result) {
  const std::lock_guard lock(host().mutex);
  const auto& comms = host().comms;
  const auto last = std::find_if(comms.rbegin(), comms.rend(),
                                 [&](const auto& comm) { return comm->device == device && !comm->dead; });
  if (last != comms.rend()) {
    (*last)->error = result;
  }
}

std::vector<std::string> violations() {
  const std::lock_guard lock(calls_made().mutex);
  return calls_made().violations;
}

int live_communicators() {
  const std::lock_guard lock(host().mutex);
  int live = 0;
  for (const auto& comm : host().comms) {
    live += comm->dead ? 0 : 1;
  }
  return live;
}

std::size_t live_allocations() {
  const std::lock_guard lock(host().mutex);
  return host().allocations.size();
}

std::size_t live_registrations() {
  const std::lock_guard lock(host().mutex);
  return host().registrations;
}

std::size_t live_operators() {
  const std::lock_guard lock(host().mutex);
  return host().operators.size();
}

std::size_t largest_group() {
  const std::lock_guard lock(host().mutex);
  return host().largest_group;
}

std::uint64_t averages() {
  const std::lock_guard lock(host().mutex);
  return host().averages;
}

SeenConfig last_config() {
  const std::lock_guard lock(host().mutex);
  return host().config;
}

ncclResult_t check_comm(ncclComm_t comm, const char* function) {
  if (comm == nullptr) {
    violation(std::string(function) + ": the communicator is null");
    return ncclInvalidArgument;
  }
  if (comm->dead) {
    violation(std::string(function) + " on a communicator that was destroyed or aborted");
    return ncclInvalidArgument;
  }
  return ncclSuccess;
}

}  // namespace fake_nccl

using namespace fake_nccl;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  enter("ncclGetVersion", true);
  *version = rules().version;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "operation in progress";
  }
  return "unknown result code";
}

const char* ncclGetLastError(ncclComm_t comm) {
  thread_local std::string text;
  text = comm != nullptr ? comm->meeting->clique->error_text() : "";
  return text.c_str();
}

ncclResult_t ncclGroupStart() {
  if (const ncclResult_t failed = enter("ncclGroupStart"); failed != ncclSuccess) {
    return failed;
  }
  ++group().depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  const ncclResult_t failed = enter("ncclGroupEnd");
  Group& mine = group();
  if (mine.depth == 0) {
    violation("ncclGroupEnd without ncclGroupStart");
    return ncclInvalidUsage;
  }
  if (--mine.depth > 0) {
    return failed;
  }
  Group todo;
  std::swap(todo, mine);
  if (failed != ncclSuccess) {
    return failed;
  }
  if (todo.error != ncclSuccess) {
    return todo.error;
  }
  return launch(todo);
}

}  // extern "C"
