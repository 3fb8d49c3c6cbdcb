// What c10d is given for an operation on a GPU: the current stream waits for it, the host does not.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/work.h"
#include "torch/backend_work.h"
#include "torch/device.h"

namespace hpcomm {

class LaneWork final : public c10d::Work {
 public:
  using Storages = std::vector<c10::Storage>;

  // `held`: what the operation uses. The lane keeps it as well, without looking into it.
  LaneWork(int rank, c10d::OpType type, WorkPtr work, std::shared_ptr<Stream> lane, std::vector<at::Tensor> results,
           std::shared_ptr<Storages> held)
      : c10d::Work(rank, type),
        work_(std::move(work)),
        lane_(std::move(lane)),
        device_(lane_->device()),
        results_(std::move(results)),
        held_(std::move(held)) {
    issued_on_.note(compute_stream(device_)->native_handle());
  }

  bool isCompleted() override { return work_->done(); }
  bool isSuccess() const override { return exception() == nullptr; }
  std::exception_ptr exception() const override {
    try {
      work_->check();
      return nullptr;
    } catch (const Error& error) {
      return as_c10d_error(error);
    }
  }
  bool wait(std::chrono::milliseconds timeout) override {
    return for_torch([&] {
      work_->check();
      Stream& compute = *compute_stream(device_);
      compute.wait(work_->event());
      if (issued_on_.only(compute.native_handle())) {
        let_go();
      }
      if (timeout != kNoTimeout) {
        wait_to_end(*work_, timeout);  // a limit is for the host
      }
      return true;
    });
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return results_; }
  // Made for those who ask, as few do: it takes events of its own.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::call_once(asked_, [this] {
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(),
                                                         std::vector<c10::Device>{torch_device(device_)});
      // Completed at once, with the lane's events: whoever waits for it lets its stream wait.
      with_current(*lane_, [this] { future_->markCompleted(c10::IValue(results_)); });
    });
    return future_;
  }

 private:
  // The lane lets go of memory at a later operation of its own, and a program that gathers layer by layer has no room
  // for that. Once the stream that the operation was issued on waits for it, torch's allocator may have that back.
  void let_go() {
    Storages freed;
    const std::lock_guard lock(mutex_);
    freed.swap(*held_);
  }

  WorkPtr work_;
  std::shared_ptr<Stream> lane_;
  Device device_;
  std::vector<at::Tensor> results_;
  std::mutex mutex_;
  std::shared_ptr<Storages> held_;
  UsedOn issued_on_;
  std::once_flag asked_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace hpcomm
