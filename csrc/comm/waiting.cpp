// What a thread waits for: the outermost of nested waits, and its words.
#include "comm/waiting.h"

#include <string_view>

namespace hpcomm {

namespace {
thread_local Waiting* outermost = nullptr;
}  // namespace

Waiting::Waiting(const ErrorContext* what, const void* about, std::string (*say)(const void* about)) noexcept
    : what_(what), about_(about), say_(say), is_outermost_(outermost == nullptr) {
  if (is_outermost_) {
    outermost = this;
  }
}

Waiting::~Waiting() {
  if (!is_outermost_) {
    return;
  }
  outermost = nullptr;
  if (told.number != 0) {
    told.over(told.number);
  }
}

Waiting* Waiting::current() noexcept { return outermost; }

std::string Waiting::words() const {
  if (what_ == nullptr) {
    return say_(about_);
  }
  const std::string_view operation = what_->operation;
  std::string text = what_->operation;
  if (what_->sequence >= 0) {
    text += str(" #", what_->sequence);
  }
  if (what_->peer >= 0 && (operation.starts_with("send") || operation.starts_with("recv"))) {
    text += str(operation.starts_with("send") ? " to rank " : " from rank ", what_->peer);
  }
  return about_ == nullptr ? text : str(text, " on lane ", *static_cast<const std::string*>(about_));
}

}  // namespace hpcomm
