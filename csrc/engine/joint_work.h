// JointWork: the operations of one message as one Work.
#pragma once

#include <memory>
#include <vector>

#include "comm/work.h"
#include "engine/refusal.h"

namespace hpcomm {

class JointWork final : public Work {
 public:
  // `parts` are of one lane, in its order; at least one. While one of them waits, `refusal`, if there is
  // one, is looked at.
  JointWork(ErrorContext what, std::vector<WorkPtr> parts, std::shared_ptr<Refusal> refusal)
      : what_(std::move(what)), parts_(std::move(parts)), refusal_(std::move(refusal)) {}

  [[nodiscard]] const ErrorContext& what() const noexcept override { return what_; }
  [[nodiscard]] bool done() const override;
  [[nodiscard]] bool wait_until(Deadline deadline) const override;
  // Of the last part: a lane runs them in order.
  [[nodiscard]] Event event() const override { return parts_.back()->event(); }
  [[nodiscard]] Device device() const noexcept override { return parts_.back()->device(); }
  void check() const override;

 private:
  ErrorContext what_;
  std::vector<WorkPtr> parts_;
  std::shared_ptr<Refusal> refusal_;
};

}  // namespace hpcomm
