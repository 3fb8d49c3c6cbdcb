// What c10d is given for an operation of ours: c10d::Work over hpcomm::Work.
#pragma once

#include <c10/core/InferenceMode.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/host_communicator.h"
#include "comm/mailbox.h"
#include "torch/profiler_event.h"

namespace hpcomm {

// Blocks without the GIL until `work` has ended, and looks at signals meanwhile. Throws the operation's error; with a
// positive `limit`, kTimedOut when it has passed.
void wait_to_end(const Work& work, std::chrono::milliseconds limit);

// The error as the callers of a Backend see it: time-outs say "Timed out", which programs written for gloo look for.
[[nodiscard]] std::exception_ptr as_c10d_error(const Error& error);

// How c10d::Backend::getError() says why a communicator was aborted, if it was.
[[nodiscard]] c10d::ErrorType error_type_of(const std::optional<Error>& why);

// What `body` returns; what it throws is visible to torch.
template <typename Body>
auto for_torch(const Body& body) {
  try {
    return body();
  } catch (const Error& error) {
    std::rethrow_exception(as_c10d_error(error));
  }
}

// Counts the threads that are inside of something.
class Inside {
 public:
  // `count` may be null: then it counts nothing.
  explicit Inside(std::atomic<int>* count) : count_(count) {
    if (count_ != nullptr) {
      ++*count_;
    }
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  ~Inside() {
    if (count_ != nullptr) {
      --*count_;
    }
  }

 private:
  std::atomic<int>* const count_;
};

// A collective: runs on the communicator's lane, or has run already.
class BackendWork final : public c10d::Work {
 public:
  // `title` and `inputs` are for the profiler; null when nobody looks.
  BackendWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
              std::vector<at::Tensor> results, std::uint64_t sequence);

  // Once, when the operation has been issued. `inside` counts the threads that wait for it and others.
  void attach(WorkPtr work, const std::shared_ptr<HostCommunicator>& communicator,
              std::shared_ptr<std::atomic<int>> inside);
  // Ends the profiler's event, once. Whoever sees that the operation has ended does so before telling: the profile may
  // be over a moment later.
  void end_event();

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void abort() override;
  std::vector<at::Tensor> result() override { return results_; }
  // Completed by the lane; at once when the operation has ended.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return sequence_; }

 private:
  void settle(c10::ivalue::Future& future) const;

  // Not that of c10d::Work, which writes to what is gone where an operation ends after the profile.
  const std::shared_ptr<ProfilerEvent> event_;
  WorkPtr work_;
  // The group may have been destroyed meanwhile; everything that it had issued has ended then.
  std::weak_ptr<HostCommunicator> communicator_;
  std::shared_ptr<std::atomic<int>> inside_;
  std::vector<at::Tensor> results_;
  const std::uint64_t sequence_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A message. It has no future: wait() for it, as with gloo.
class MessageWork final : public c10d::Work {
 public:
  // `staging`, if defined, is what the message is received in and `target` where it belongs.
  MessageWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs, at::Tensor target,
              at::Tensor staging);

  void attach(MailPtr mail) { mail_ = std::move(mail); }

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  int sourceRank() const override { return mail_->source(); }
  std::vector<at::Tensor> result() override { return {target_}; }

 private:
  void arrived();

  const std::shared_ptr<ProfilerEvent> event_;  // as a collective's
  MailPtr mail_;
  at::Tensor target_;
  at::Tensor staging_;
  const bool inference_ = c10::InferenceMode::is_enabled();
  std::once_flag arrived_;
};

// Several operations as one.
class WorkList final : public c10d::Work {
 public:
  explicit WorkList(std::vector<c10::intrusive_ptr<c10d::Work>> works);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace hpcomm
