// An event of torch's profiler that begins in one thread and ends in another.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>

#include <functional>
#include <memory>
#include <mutex>

namespace hpcomm {

class ProfilerEvent {
 public:
  // Begins one, over `input`. Null when nobody profiles.
  [[nodiscard]] static std::shared_ptr<ProfilerEvent> begin(const char* title, const at::Tensor& input) {
    if (!at::hasCallbacks()) {
      return nullptr;
    }
    const auto event = std::make_shared<ProfilerEvent>();
    const auto record = std::make_shared<at::RecordFunction>(at::RecordScope::USER_SCOPE);
    if (record->isActive()) {
      record->_setAsync();
      const c10::IValue value(input);
      record->before(title, c10::ArrayRef<const c10::IValue>(&value, 1));
      event->end_ = at::wrapPropagateTLSState([record] { record->end(); });
    }
    return event;
  }
  // The first call counts. Everybody who waits for what this is about calls it before telling: the profiler may be gone
  // a moment later.
  void end() {
    std::call_once(ended_, [this] {
      if (end_) {
        end_();
      }
    });
  }

 private:
  std::once_flag ended_;
  std::function<void()> end_;
};

}  // namespace hpcomm
