// Our reduction as a communication hook of torch's DistributedDataParallel.
#pragma once

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <memory>

#include "comm/communicator.h"

namespace hpcomm {

// From now on `reducer` hands its full buckets to us: averaged over `communicator` on its lane while the backward
// goes on, in the order in which torch's Reducer issues them (bucket order). Runs without the GIL.
// Registering twice is an error of torch's.
void register_ddp_hook(c10d::Reducer& reducer, std::shared_ptr<Communicator> communicator);

}  // namespace hpcomm
