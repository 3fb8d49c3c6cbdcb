// An event of torch's profiler that begins in one thread and ends in another.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace hpcomm {

class ProfilerEvent {
 public:
  // Begins one, over `inputs`. Null when nobody profiles.
  [[nodiscard]] static std::shared_ptr<ProfilerEvent> begin(const char* title, c10::ArrayRef<at::Tensor> inputs) {
    if (!at::hasCallbacks()) {
      return nullptr;
    }
    auto event = std::make_shared<ProfilerEvent>();
    auto record = std::make_shared<at::RecordFunction>(at::RecordScope::USER_SCOPE);
    if (record->isActive()) {
      record->_setAsync();
      const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
      record->before(title, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
      const auto profile = c10::ThreadLocalDebugInfo::current();
      event->in_profile_ = profile != nullptr;
      event->profile_ = profile;
      event->record_ = std::move(record);
    }
    return event;
  }

  ProfilerEvent() = default;
  ProfilerEvent(const ProfilerEvent&) = delete;
  ProfilerEvent& operator=(const ProfilerEvent&) = delete;
  ~ProfilerEvent() { end(); }

  // The first call counts. Everybody who waits for what this is about calls it before telling: the profile may be over
  // a moment later, and then the event has no end.
  void end() {
    std::call_once(ended_, [this] {
      if (record_ == nullptr) {
        return;
      }
      if (const auto profile = profile_.lock()) {
        const c10::DebugInfoGuard here(profile);
        record_->end();
      } else if (!in_profile_) {
        record_->end();
      } else {
        // Its end, which its destructor would be, too, writes to memory that went with the profile: it is kept for
        // ever.
        static_cast<void>(new std::shared_ptr<at::RecordFunction>(std::move(record_)));
      }
    });
  }

 private:
  std::once_flag ended_;
  std::shared_ptr<at::RecordFunction> record_;
  // What the thread that profiles holds while it does: the profiler itself lives on in whatever took its thread's state
  // along, and says nothing of its end.
  std::weak_ptr<c10::ThreadLocalDebugInfo> profile_;
  bool in_profile_ = false;
};

}  // namespace hpcomm
