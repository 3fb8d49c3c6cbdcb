// Memory for the engine's buckets and messages from the communicator that carries them, so that it can be sent or
// reduced without a copy where the transport can.
#pragma once

#include <memory>
#include <utility>

#include "base/view.h"
#include "comm/communicator.h"

namespace hpcomm {

class CommunicatorAllocator final : public Allocator {
 public:
  explicit CommunicatorAllocator(std::shared_ptr<Communicator> communicator) : communicator_(std::move(communicator)) {}
  Buffer allocate(std::size_t bytes) override { return communicator_->allocate(bytes); }
  Buffer allocate_alike(std::size_t bytes) override { return communicator_->allocate_alike(bytes); }

 private:
  std::shared_ptr<Communicator> communicator_;
};

}  // namespace hpcomm
