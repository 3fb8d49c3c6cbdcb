// The transport between ranks of one host: shared memory.
#pragma once

#include <functional>
#include <memory>

#include "base/error.h"
#include "comm/communicator.h"
#include "comm/shm/neighbourhood.h"

namespace hpcomm {

// Makes a group's communicator in another way where shared memory cannot serve it, for the reason `why`.
using ShmFallback = std::function<std::shared_ptr<Communicator>(CommunicatorConfig config, const Error& why)>;

// Collective over `config.ranks`, which must all be in `neighbourhood`. Throws kTransport, on all of them, when there
// is not enough memory or they are too many; kTimedOut or the job's failure when a rank does not come. `fallback`, if
// given, serves subgroups that shared memory cannot.
//
// Differs from other transports in what it promises: operations that do not fit together raise kSchemaMismatch on every
// rank before data moves, and the communicator stays usable; allocate() gives memory that collectives use in place.
[[nodiscard]] std::shared_ptr<Communicator> make_shm_communicator(CommunicatorConfig config,
                                                                  std::shared_ptr<shm::Neighbourhood> neighbourhood,
                                                                  ShmFallback fallback = nullptr);
// The same, or what `fallback` makes where that throws kTransport.
[[nodiscard]] std::shared_ptr<Communicator> make_shm_or(ShmFallback fallback, CommunicatorConfig config,
                                                        std::shared_ptr<shm::Neighbourhood> neighbourhood);

}  // namespace hpcomm
