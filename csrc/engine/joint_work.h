// JointWork: the operations of one message as one Work.
#pragma once

#include <memory>
#include <vector>

#include "comm/work.h"
#include "engine/refusal.h"

namespace hpcomm {

class JointWork final : public Work {
 public:
  // Of a send whose receiver is gone: whether only the end of its lane ends it.
  enum class Ends { kWithLane, kByItself };

  // `parts` are of one lane, in its order; at least one. While one of them waits, `refusal`, if there is
  // one, is looked at.
  JointWork(ErrorContext what, std::vector<WorkPtr> parts, std::shared_ptr<Refusal> refusal,
            Ends ends = Ends::kWithLane)
      : what_(std::move(what)), parts_(std::move(parts)), refusal_(std::move(refusal)), ends_(ends) {}

  [[nodiscard]] const ErrorContext& what() const noexcept override { return what_; }
  [[nodiscard]] bool done() const override;
  [[nodiscard]] bool wait_until(Deadline deadline) const override;
  // Of the last part: a lane runs them in order.
  [[nodiscard]] Event event() const override { return parts_.back()->event(); }
  [[nodiscard]] Device device() const noexcept override { return parts_.back()->device(); }
  void check() const override;

 private:
  // Throws what the other end has told.
  void ask() const;
  // Once its send has failed by `why`.
  void ask_again(const Error& why) const;

  ErrorContext what_;
  std::vector<WorkPtr> parts_;
  std::shared_ptr<Refusal> refusal_;
  Ends ends_;
};

}  // namespace hpcomm
