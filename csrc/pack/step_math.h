// The arithmetic between the reduction of a step's loss and the kernels that scale by it, where the sums lie.
#pragma once

#include "base/view.h"
#include "pack/host_device.h"
#include "stream/stream.h"

namespace hpcomm {

// The places of `sums` below.
struct LossSums {
  static constexpr int kLoss = 0;
  static constexpr int kWeight = 1;
  static constexpr int kReducing = 2;  // ranks that reduce in this step
  static constexpr int kKeeping = 3;   // ranks that keep gradients of steps before
  static constexpr int kKept = 4;      // weight of steps whose gradients wait for a later reduction
};

// In the stream's order, on its device: adds the step's weight to what was kept, if any rank keeps it, makes `*factor`
// one over that, and forgets what was kept unless the step accumulates. `sums` points to the five doubles of LossSums,
// `factor` to one. Only the kept weight and the factor change. On a GPU, may be captured into a graph.
void finish_loss(Stream& stream, double* sums, double* factor, bool accumulate, Keepalive keepalive = nullptr);

// What it does, on either device.
HPCOMM_HOST_DEVICE void run_finish_loss(double* sums, double* factor, bool accumulate) noexcept {
  const double before = sums[LossSums::kKeeping] == 0 ? 0.0 : sums[LossSums::kKept];
  const double kept = before + sums[LossSums::kWeight];
  // Weights of zero (a batch of padding) must not turn zero gradients into NaN.
  *factor = kept == 0 ? 0.0 : 1.0 / kept;
  sums[LossSums::kKept] = accumulate ? kept : 0.0;
}

// The twin: pack_cuda.cu, and pack_no_cuda.cpp in builds without CUDA.
void launch_finish_loss_cuda(Stream& stream, double* sums, double* factor, bool accumulate);

}  // namespace hpcomm
