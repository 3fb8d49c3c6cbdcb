// HostCommunicator: a transport whose operations are blocking calls that a CPU stream runs in issue order.
#pragma once

#include <mutex>
#include <optional>

#include "comm/communicator.h"

namespace hpcomm {

class HostCommunicator : public Communicator {
 public:
  [[nodiscard]] Device device() const noexcept override { return {}; }
  void close() override;
  void abort(const Error& why) noexcept override;
  [[nodiscard]] std::optional<Error> aborted() const override;

 protected:
  explicit HostCommunicator(CommunicatorConfig config);
  // Transports call it last in their constructor: from here on a failed peer interrupts this communicator.
  void watch_peers();

  // Executes one operation to its end in the lane's order. Throws Error; must return soon after interrupt().
  virtual void execute(const Operation& operation, Deadline deadline) = 0;
  // Makes a running execute() return. Called once, from any thread.
  virtual void interrupt() noexcept = 0;

  WorkPtr submit(Operation operation) final;
  // Transports call it first in their destructor: no execute() runs or starts afterwards.
  void shut_down() noexcept;

 private:
  void run(const Operation& operation, HostWork& work);

  mutable std::mutex mutex_;
  std::optional<Error> aborted_;
  bool closed_ = false;
  std::uint64_t listener_ = 0;
};

}  // namespace hpcomm
