// What c10d is given for an operation on a GPU: the current stream waits for it, the host does not.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <utility>
#include <vector>

#include "comm/work.h"
#include "torch/backend_work.h"
#include "torch/device.h"

namespace hpcomm {

class LaneWork final : public c10d::Work {
 public:
  LaneWork(int rank, c10d::OpType type, WorkPtr work, Stream& lane, std::vector<at::Tensor> results)
      : c10d::Work(rank, type), work_(std::move(work)), device_(lane.device()), results_(std::move(results)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(),
                                                       std::vector<c10::Device>{torch_device(device_)});
    // Completed at once, with the lane's events: whoever waits for it lets its stream wait.
    with_current(lane, [this] { future_->markCompleted(c10::IValue(results_)); });
  }

  bool isCompleted() override { return work_->done(); }
  bool isSuccess() const override { return exception() == nullptr; }
  std::exception_ptr exception() const override {
    try {
      work_->check();
      return nullptr;
    } catch (const Error& error) {
      return std::make_exception_ptr(as_c10d_error(error));
    }
  }
  bool wait(std::chrono::milliseconds timeout) override {
    return for_torch([&] {
      work_->check();
      compute_stream(device_)->wait(work_->event());
      if (timeout != kNoTimeout) {
        wait_to_end(*work_, timeout);  // a limit is for the host
      }
      return true;
    });
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  WorkPtr work_;
  Device device_;
  std::vector<at::Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace hpcomm
