// Id, initialisation and split of communicators.
#include "comm/nccl/nccl_init.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/hash.h"
#include "comm/nccl/teardown.h"
#include "comm/nccl/watchdog.h"
#include "comm/waiting.h"
#include "stream/cuda_call.h"

namespace hpcomm::nccl {

namespace {

void check_limits(const std::string& lane, const NcclLimits& limits) {
  HPCOMM_REQUIRE(limits.min_ctas >= 0 && limits.max_ctas >= 0 &&
                     (limits.min_ctas == 0 || limits.max_ctas == 0 || limits.min_ctas <= limits.max_ctas),
                 "NCCL limits of ", lane, ": min_ctas is ", limits.min_ctas, ", max_ctas ", limits.max_ctas,
                 "; give 0 <= min_ctas <= max_ctas, where 0 leaves it to NCCL");
  HPCOMM_REQUIRE(limits.cga_cluster_size >= -1 && limits.cga_cluster_size <= 8, "NCCL limits of ", lane,
                 ": cga_cluster_size is ", limits.cga_cluster_size, "; give 0 to 8, or -1");
}

void check_options(const NcclOptions& options) {
  check_limits("all lanes", options);
  for (const auto& [lane, limits] : options.lanes) {
    check_limits("lane " + lane, limits);
  }
}

std::string terms(const NcclLimits& limits) {
  return str("min_ctas ", limits.min_ctas, ", max_ctas ", limits.max_ctas, ", cga_cluster_size ",
             limits.cga_cluster_size);
}

// What must be the same on all ranks, so that a difference is an error with words and not a hang.
std::string terms(const Library& nccl, const NcclOptions& options) {
  std::string all = str("NCCL ", nccl.version_text(), options.blocking ? ", blocking, " : ", ",
                        options.registers ? "registering, " : "", terms(options));
  for (const auto& [lane, limits] : options.lanes) {
    all += str("; ", lane, ": ", terms(limits));
  }
  return all;
}

// Group rank 0's id and terms.
UniqueId agree_on_id(const Library& nccl, const CommunicatorConfig& config, const NcclOptions& options,
                     Deadline deadline, const ErrorContext& what) {
  const std::uint64_t channel = Fingerprint().add(config.name).add("nccl id").value();
  const std::string mine = terms(nccl, options);
  UniqueId id{};
  if (config.rank == 0) {
    const Result made = nccl.GetUniqueId(&id);
    if (made != Result::kSuccess) {
      throw Error(ErrorKind::kTransport, str("ncclGetUniqueId: ", nccl.words(made)), what);
    }
    for (std::size_t r = 1; r < config.ranks.size(); ++r) {
      config.control->send(config.ranks[r], channel, std::string(id.bytes, sizeof id.bytes) + mine);
    }
    return id;
  }
  const std::string message = config.control->receive(config.ranks.front(), channel, deadline, config.poll);
  if (message.size() < sizeof id.bytes) {
    throw Error(ErrorKind::kProtocol, "the id of an NCCL communicator is too short", what);
  }
  std::memcpy(id.bytes, message.data(), sizeof id.bytes);
  const std::string theirs = message.substr(sizeof id.bytes);
  if (theirs != mine) {
    throw Error(ErrorKind::kSchemaMismatch,
                str("ranks want different NCCL communicators: rank ", config.ranks.front(), " has ", theirs, "; rank ",
                    what.rank, " has ", mine),
                what);
  }
  return id;
}

ErrorContext context_of(const CommunicatorConfig& config, const char* operation) {
  return {config.ranks[static_cast<std::size_t>(config.rank)], -1, 0, operation};
}

SessionPtr make_session(const Library& nccl, const CommunicatorConfig& config, bool blocking) {
  auto session = std::make_shared<Session>(nccl, config.stream->device().index, config.lane, config.control,
                                           config.ranks, blocking);
  session->listen();
  return session;
}

// A session whose communicator did not come about.
void give_up(const SessionPtr& session, const Error& why) {
  session->stop_listening();
  session->abort(why, false);
  if (session->begin_abort()) {
    start_abort({session});
    (void)session->wait_gone(Clock::now() + std::chrono::seconds(2));
  }
}

// After a split that failed or ran out of time: false when NCCL may still be at it. Until it has ended, a thread of
// NCCL's writes to the child, and the parent takes no call; only an abort of the parent ends it, here and on the peers.
bool end_split(Session& parent, const SessionPtr& child, const Error& why) {
  parent.abort(why, true);
  parent.keep(child);
  wake_watchdog();
  return parent.wait_gone(Clock::now() + std::chrono::seconds(2));
}

SessionPtr initialise(const CommunicatorConfig& config, const NcclOptions& options, bool launch_order,
                      Deadline deadline) {
  check_options(options);
  const ErrorContext what = context_of(config, "ncclCommInitRank");
  const Waiting waiting(what, &config.lane);
  const Library& nccl = library();
  const UniqueId id = agree_on_id(nccl, config, options, deadline, what);
  const SessionPtr session = make_session(nccl, config, false);
  try {
    const cuda::DeviceGuard device(session->device);
    const std::lock_guard inside(session->api);
    Config wanted = make_config(nccl, options.of(config.lane), launch_order);
    const Result begun =
        nccl.CommInitRankConfig(&session->comm, static_cast<int>(config.ranks.size()), id, config.rank, &wanted);
    session->settle(begun, session->comm, deadline, what, config.poll);
  } catch (const Error& error) {
    give_up(session, error);
    throw;
  } catch (...) {  // a signal, by way of poll()
    give_up(session, Error(ErrorKind::kClosed, "the making of an NCCL communicator was interrupted", what));
    throw;
  }
  return session;
}

}  // namespace

Connected connect(const CommunicatorConfig& config, const NcclOptions& options, bool launch_order,
                  bool will_be_splits) {
  const Deadline deadline = deadline_after(config.timeout);
  SessionPtr first = initialise(config, options, launch_order, deadline);
  if (!options.blocking || !can_block(first->nccl) || config.ranks.size() == 1) {  // alone there is nothing to launch
    return {std::move(first), nullptr};
  }
  watch(first);
  SessionPtr session;
  try {
    session = split(*first, config, 0, options, launch_order, true, deadline);
  } catch (const Error& error) {
    give_up(first, error);
    throw;
  } catch (...) {  // a signal, by way of poll()
    give_up(first, Error(ErrorKind::kClosed, "the making of an NCCL communicator was interrupted"));
    throw;
  }
  if (will_be_splits) {
    return {std::move(session), std::move(first)};
  }
  first->stop_listening();
  if (first->begin_finalize()) {
    start_finalize(first);
  } else if (first->begin_abort()) {  // the job failed meanwhile
    start_abort({first});
  }
  return {std::move(session), nullptr};
}

SessionPtr split(Session& parent, const CommunicatorConfig& part, int color, const NcclOptions& options,
                 bool launch_order, bool blocking, Deadline deadline) {
  const ErrorContext what = context_of(part, "ncclCommSplit");
  const Waiting waiting(what, &part.lane);
  // NCCL: no operation of the parent may be outstanding.
  if (!parent.idle_until(deadline) && !parent.is_aborted()) {
    throw Error(ErrorKind::kTimedOut, str("split on lane ", parent.lane, ": operations before it are not done"), what);
  }
  const SessionPtr session = make_session(parent.nccl, part, blocking);
  bool begun = false;
  const auto end = [&](const Error& error) {
    if (begun && !end_split(parent, session, error)) {
      session->stop_listening();
    } else {
      give_up(session, error);
    }
  };
  try {
    const cuda::DeviceGuard device(session->device);
    const std::lock_guard inside(session->api);
    {
      const std::lock_guard inside_parent(parent.api);
      parent.require_open(what);
      HPCOMM_ASSERT(parent.comm != nullptr, "an open session without a communicator");
      Config wanted = make_config(parent.nccl, options.of(part.lane), launch_order, blocking);
      begun = true;
      const Result result = parent.nccl.CommSplit(parent.comm, color, part.rank, &session->comm, &wanted);
      // NCCL says kSuccess when it has begun, not kInProgress; the parent's state tells when the child is there.
      parent.settle(result == Result::kSuccess ? Result::kInProgress : result, parent.comm, deadline, what, part.poll);
    }
    HPCOMM_ASSERT(session->comm != nullptr, "ncclCommSplit made no communicator");
    session->settle(Result::kInProgress, session->comm, deadline, what, part.poll);
    int size = -1;
    int rank = -1;
    session->settle(session->nccl.CommCount(session->comm, &size), session->comm, deadline, what);
    session->settle(session->nccl.CommUserRank(session->comm, &rank), session->comm, deadline, what);
    HPCOMM_ASSERT(size == static_cast<int>(part.ranks.size()) && rank == part.rank, "ncclCommSplit made rank ", rank,
                  " of ", size, ", not ", part.rank, " of ", part.ranks.size());
  } catch (const Error& error) {
    end(error);
    throw;
  } catch (...) {  // a signal, by way of poll()
    end(Error(ErrorKind::kClosed, "the split of an NCCL communicator was interrupted", what));
    throw;
  }
  return session;
}

}  // namespace hpcomm::nccl
