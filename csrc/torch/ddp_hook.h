// Our reduction as a communication hook of torch's DistributedDataParallel.
#pragma once

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <memory>
#include <string>

#include "comm/communicator.h"

namespace hpcomm {

// From now on `reducer` hands its full buckets to us: averaged over `communicator` on its lane while the backward
// goes on, in the order in which torch's Reducer issues them (bucket order). Runs without the GIL.
// Registering twice is an error of torch's. The profiler's events are called `events`:all_reduce.
void register_ddp_hook(c10d::Reducer& reducer, std::shared_ptr<Communicator> communicator, const std::string& events);

}  // namespace hpcomm
