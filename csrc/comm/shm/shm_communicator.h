// The transport between ranks of one host: shared memory.
#pragma once

#include <memory>

#include "comm/communicator.h"
#include "comm/shm/neighbourhood.h"

namespace hpcomm {

// Collective over `config.ranks`, which must all be in `neighbourhood`. Throws kTransport, on all of them, when there
// is not enough memory; kTimedOut or the job's failure when a rank does not come.
//
// Differs from other transports in what it promises: operations that do not fit together raise kSchemaMismatch on every
// rank before data moves, and the communicator stays usable; allocate() gives memory that collectives use in place.
[[nodiscard]] std::shared_ptr<Communicator> make_shm_communicator(CommunicatorConfig config,
                                                                  std::shared_ptr<shm::Neighbourhood> neighbourhood);

}  // namespace hpcomm
