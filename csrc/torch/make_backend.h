// Makes the backend of a new group. Twin files: make_backend_cuda.cpp, and make_backend_cpu.cpp in builds without CUDA.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>

#include "comm/host_communicator.h"
#include "torch/backend_job.h"

namespace hpcomm {

[[nodiscard]] c10::intrusive_ptr<c10d::Backend> make_backend(std::shared_ptr<HostCommunicator> communicator,
                                                             std::shared_ptr<BackendJob> job);

}  // namespace hpcomm
