// NCCL in a build without CUDA: there is none.
#include "base/error.h"
#include "comm/nccl/nccl_communicator.h"

namespace hpcomm {

bool blocking_of_environment() { return true; }
bool registration_of_environment() { return false; }

std::shared_ptr<Communicator> make_nccl_communicator(CommunicatorConfig, const NcclOptions&, bool) {
  throw Error(ErrorKind::kInvalidArgument,
              "this copy of hpcomm was built without CUDA; build it with USE_CUDA=1 against a torch with CUDA");
}

void set_failure_hook(void (*)(const Error&) noexcept) noexcept {}

void set_launch_order_in_time(bool) noexcept {}

std::string nccl_version() { return ""; }

}  // namespace hpcomm
