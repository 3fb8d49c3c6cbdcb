// IssueOrderStream: a lane whose tasks take a ticket of the device where the host enqueues them.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "comm/emulated/emulated_device.h"
#include "stream/stream.h"

namespace hpcomm {

// Why tasks and not operations: the receipt of a message is issued by the host as one task, which learns the size from
// the header and only then issues the recv, on the lane. On a GPU the host itself waits for the header, so the recv
// has the place where the host was. Its ticket is that of the task; taken when the header comes, the order of start
// would depend on the network, and plans that verify would hang. A task that never issues an operation (a copy) holds
// its place as well, as a kernel does. Events are no work: recording and waiting take no ticket.
class IssueOrderStream final : public Stream {
 public:
  IssueOrderStream(std::shared_ptr<Stream> lane, std::string name, std::shared_ptr<EmulatedDevice> device)
      : lane_(std::move(lane)), name_(std::move(name)), device_(std::move(device)) {}

  [[nodiscard]] hpcomm::Device device() const noexcept override { return lane_->device(); }
  void enqueue(Task task) override;
  // A task that may leave its place (comm/device_slot.h); it is told its ticket.
  void enqueue_movable(std::function<void(std::uint64_t ticket)> task);
  void hold(Keepalive memory) override { lane_->hold(std::move(memory)); }
  void hold_until(Keepalive memory, const Event& passed) override { lane_->hold_until(std::move(memory), passed); }
  [[nodiscard]] Event record() override { return lane_->record(); }
  void wait(const Event& event) override { lane_->wait(event); }
  [[nodiscard]] bool is_current() const noexcept override { return lane_->is_current(); }
  [[nodiscard]] bool idle() const noexcept override { return lane_->idle(); }

  // Of the task that runs: call it on the lane only. Empty in a task that came by way of wait().
  [[nodiscard]] std::optional<std::uint64_t> current_ticket() const noexcept { return *current_; }

 private:
  void enqueue(EmulatedDevice::Kind kind, std::function<void(std::uint64_t ticket)> task);

  std::shared_ptr<Stream> lane_;
  std::string name_;
  std::shared_ptr<EmulatedDevice> device_;
  // Shared with the tasks, which may outlive this object; touched by the lane's thread alone.
  std::shared_ptr<std::optional<std::uint64_t>> current_ = std::make_shared<std::optional<std::uint64_t>>();
};

}  // namespace hpcomm
