// One all-reduce of four numbers.
#include "engine/step_loss.h"

#include <cmath>
#include <limits>

namespace hpcomm {

StepLoss::StepLoss(std::shared_ptr<Communicator> communicator, bool evaluates)
    : communicator_(std::move(communicator)),
      evaluates_(evaluates),
      sums_(std::make_shared<Sums>()),
      factor_(std::make_shared<double>(1.0)) {}

void StepLoss::issue(double loss_sum, double weight_sum, bool accumulate, bool keeps) {
  HPCOMM_REQUIRE(work_ == nullptr || work_->done(), "the loss of the previous step is still being reduced");
  Sums& own = *sums_;
  own[LossSums::kLoss] = loss_sum;
  own[LossSums::kWeight] = weight_sum;
  own[LossSums::kReducing] = evaluates_ ? LossSums::kEvaluation : (accumulate ? 0 : 1);
  own[LossSums::kKeeping] = keeps ? 1 : 0;
  OpOptions options;
  options.keepalive = sums_;
  const BufferView numbers{own.data(), 4 * sizeof(double), 4, DType::kFloat64, {}};
  const WorkPtr reduced = communicator_->all_reduce(numbers, ReduceOp::kSum, options);
  auto work = std::make_shared<HostWork>(reduced->what());
  // On the lane, so that the factor is there when ready() is, and the host never waits for it.
  communicator_->stream().enqueue(
      [sums = sums_, factor = factor_, reduced, work, accumulate, ranks = communicator_->size()] {
        try {
          reduced->wait();
          double odd = 0;
          run_finish_loss(sums->data(), factor.get(), accumulate, {ranks, &odd});
          if (odd != 0) {
            refuse_step_kinds(odd, ranks, reduced->what());
          }
          work->complete();
        } catch (...) {
          work->fail(std::current_exception());
        }
      });
  work_ = std::move(work);
}

void StepLoss::forget() {
  HPCOMM_REQUIRE(work_ == nullptr || work_->done(), "the loss of the previous step is still being reduced");
  (*sums_)[LossSums::kKept] = 0;
}

Event StepLoss::ready() const { return work_ == nullptr ? Event() : work_->event(); }

double StepLoss::value() const noexcept {
  const double weight = (*sums_)[LossSums::kWeight];
  return weight == 0 ? std::numeric_limits<double>::quiet_NaN() : (*sums_)[LossSums::kLoss] / weight;
}

void refuse_step_kinds(double sum, int ranks, const ErrorContext& what) {
  const auto evaluating = static_cast<std::int64_t>(sum) / LossSums::kEvaluation;
  const auto reducing = static_cast<std::int64_t>(sum) % LossSums::kEvaluation;
  if (evaluating != 0 && evaluating != ranks) {
    throw Error(
        ErrorKind::kSchemaMismatch,
        str(evaluating, " of ", ranks, " ranks evaluate, the others train; call step() or eval_step() on every rank"),
        what);
  }
  throw Error(ErrorKind::kSchemaMismatch,
              str(reducing, " of ", ranks,
                  " ranks reduce their gradients in this step, the others accumulate; pass the same reduce= on every "
                  "rank"),
              what);
}

}  // namespace hpcomm
