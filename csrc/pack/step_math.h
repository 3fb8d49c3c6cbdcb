// The arithmetic between the reduction of a step's loss and the kernels that scale by it, where the sums lie.
#pragma once

#include <cstdint>

#include "base/view.h"
#include "pack/host_device.h"
#include "stream/stream.h"

namespace hpcomm {

// The places of `sums` below.
struct LossSums {
  static constexpr int kLoss = 0;
  static constexpr int kWeight = 1;
  static constexpr int kReducing = 2;  // ranks that reduce in this step, and kEvaluation for each that evaluates
  static constexpr int kKeeping = 3;   // ranks that keep gradients of steps before
  static constexpr int kKept = 4;      // weight of steps whose gradients wait for a later reduction
  static constexpr int kCount = 5;

  // More than there are ranks.
  static constexpr std::int64_t kEvaluation = 1 << 20;
};

// Do all ranks take the same kind of step? `told`: null, or where the sum at kReducing goes if they do not. On a GPU
// that lies in host memory which the device writes (pinned): the host can look at it without waiting for anything.
struct StepKinds {
  int ranks = 0;
  double* told = nullptr;
};

// In the stream's order, on its device: adds the step's weight to what was kept, if any rank keeps it, makes `*factor`
// one over that, and forgets what was kept unless the step accumulates. `sums` points to the five doubles of LossSums,
// `factor` to one. Only the kept weight, the factor and what `kinds` says change. On a GPU, may be captured into a
// graph.
void finish_loss(Stream& stream, double* sums, double* factor, bool accumulate, Keepalive keepalive = nullptr,
                 StepKinds kinds = {});

// What it does, on either device.
HPCOMM_HOST_DEVICE void run_finish_loss(double* sums, double* factor, bool accumulate, StepKinds kinds) noexcept {
  if (kinds.told != nullptr) {
    const auto sum = static_cast<std::int64_t>(sums[LossSums::kReducing]);
    const std::int64_t evaluating = sum / LossSums::kEvaluation;
    const std::int64_t reducing = sum % LossSums::kEvaluation;
    if ((evaluating != 0 && evaluating != kinds.ranks) || (reducing != 0 && reducing != kinds.ranks)) {
      *kinds.told = sums[LossSums::kReducing];
    }
  }
  const double before = sums[LossSums::kKeeping] == 0 ? 0.0 : sums[LossSums::kKept];
  const double kept = before + sums[LossSums::kWeight];
  // Weights of zero (a batch of padding) must not turn zero gradients into NaN.
  *factor = kept == 0 ? 0.0 : 1.0 / kept;
  sums[LossSums::kKept] = accumulate ? kept : 0.0;
}

// The twin: pack_cuda.cu, and pack_no_cuda.cpp in builds without CUDA.
void launch_finish_loss_cuda(Stream& stream, double* sums, double* factor, bool accumulate, StepKinds kinds);

}  // namespace hpcomm
