// A ticket around each task.
#include "comm/emulated/issue_order_stream.h"

#include <utility>

namespace hpcomm {

namespace {

// Ends with its last owner: also for a task that throws.
struct Held {
  Held(std::shared_ptr<EmulatedDevice> a_device, std::uint64_t a_ticket)
      : device(std::move(a_device)), ticket(a_ticket) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() { device->end(ticket); }

  std::shared_ptr<EmulatedDevice> device;
  std::uint64_t ticket;
};

}  // namespace

void IssueOrderStream::enqueue(Task task) {
  enqueue(EmulatedDevice::Kind::kFixed, [task = std::move(task)](std::uint64_t) { task(); });
}

void IssueOrderStream::enqueue_movable(std::function<void(std::uint64_t)> task) {
  enqueue(EmulatedDevice::Kind::kMovable, std::move(task));
}

void IssueOrderStream::enqueue(EmulatedDevice::Kind kind, std::function<void(std::uint64_t)> task) {
  device_->issue(name_, kind, [this, &task](std::uint64_t ticket) {
    lane_->enqueue([task = std::move(task), current = current_, held = std::make_shared<Held>(device_, ticket)] {
      *current = held->ticket;
      struct Reset {
        std::optional<std::uint64_t>& current;
        ~Reset() { current.reset(); }
      } const reset{*current};
      task(held->ticket);
    });
  });
}

}  // namespace hpcomm
