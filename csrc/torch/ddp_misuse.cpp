// What a DdpReducer refuses in torch's words, which callers look for: hpcomm/ddp adds what to do.
#include <torch/csrc/autograd/graph_task.h>

#include <string>
#include <utility>

#include "base/error.h"
#include "torch/ddp_reducer.h"

namespace hpcomm {

namespace {

constexpr int kMostNamed = 100;  // parameters in a message

}  // namespace

void DdpReducer::require_finished(bool expected) const {
  std::lock_guard lock(mutex_);
  if (state_ == State::kReducing || state_ == State::kDraining || (expected && state_ == State::kExpecting)) {
    refuse_unfinished();
  }
}

// Who clears gradients has begun another step, and the reduction of the last one waits for gradients that it never
// gets: those of this one would complete it, without what was cleared, and be reduced no more themselves.
void DdpReducer::require_same_step() {
  const int backward = torch::autograd::get_current_graph_task_id();
  if (std::exchange(backward_, backward) == backward) {
    return;
  }
  for (std::size_t i = 0; i < params_.size(); ++i) {
    if (marked_[i] == kMarkedWithGradient && !params_.has_gradient(i)) {
      backward_ = -1;  // looks again in the next hook
      refuse_unfinished();
    }
  }
}

void DdpReducer::refuse_unfinished() const {
  TORCH_CHECK(false, "Expected to have finished reduction in the prior iteration before starting a new one.",
              unready());
}

void DdpReducer::refuse_second_mark(std::size_t param) const {
  const std::string message =
      str("Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use "
          "of a module parameter outside the `forward` function. Please make sure model parameters are not shared "
          "across multiple concurrent forward-backward passes, or try to use _set_static_graph() as a workaround if "
          "this module graph does not change during training loop. 2) Reused parameters in multiple reentrant "
          "backward passes, for example, if you use multiple `checkpoint` functions to wrap the same part of your "
          "model, it would result in the same set of parameters been used by different reentrant backward passes "
          "multiple times, and hence marking a variable ready multiple times. 3) Incorrect unused parameter "
          "detection. Parameter at index ",
          param, " with name ", params_.names()[param], " has been marked as ready twice.");
  if (log_) {
    log_(message);
  }
  TORCH_CHECK(false, message);
}

std::string DdpReducer::unready() const {
  std::string names;
  std::string indices;
  int count = 0;
  for (std::size_t i = 0; i < marked_.size(); ++i) {
    if (marked_[i] == kUnmarked && ++count <= kMostNamed) {
      names += str(names.empty() ? "" : ", ", params_.names()[i]);
      indices += str(indices.empty() ? "" : " ", i);
    }
  }
  if (count == 0) {
    return str("\nAll parameters of rank ", communicator_->rank(),
               " received theirs: its last backward ended with an error.");
  }
  const char* const more = count > kMostNamed ? " ..." : "";
  return str("\nParameters which did not receive grad for rank ", communicator_->rank(), ": ", names, more,
             "\nParameter indices which did not receive grad for rank ", communicator_->rank(), ": ", indices, more);
}

}  // namespace hpcomm
