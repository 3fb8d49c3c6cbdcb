// Stream: an ordered queue of device work. The same contract on CPU and CUDA, so overlap is written once.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/view.h"
#include "stream/event.h"

namespace hpcomm {

using GraphIsGone = std::shared_ptr<const std::atomic<bool>>;

// Host code that runs in stream order. It must not throw: failures belong to a Work (comm/work.h).
using Task = std::function<void()>;

class Stream {
 public:
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  virtual ~Stream() = default;

  [[nodiscard]] virtual Device device() const noexcept = 0;
  // CPU: runs `task` after everything enqueued before. CUDA: at once, in the calling thread: the host only issues, and
  // what the task issues comes after everything issued before, because one thread at a time issues on a device.
  virtual void enqueue(Task task) = 0;
  // Keeps `memory` until the stream has passed this point.
  virtual void hold(Keepalive memory) = 0;
  // The same, for whoever has recorded that point already: an event on this stream, `passed`.
  virtual void hold_until(Keepalive memory, const Event& /*passed*/) { hold(std::move(memory)); }
  [[nodiscard]] virtual Event record() = 0;
  // What is enqueued from now on starts after `event`. Does not block the host, except on the caller's CPU stream, and
  // on a CUDA stream for an event of a host thread.
  virtual void wait(const Event& event) = 0;
  // True when the calling code already runs in this stream's order: it may execute at once what it would enqueue.
  [[nodiscard]] virtual bool is_current() const noexcept = 0;
  // What is issued now goes into the CUDA graph of this capture instead of running; 0: it runs.
  [[nodiscard]] virtual std::uint64_t capture() const { return 0; }
  [[nodiscard]] bool is_capturing() const { return capture() != 0; }
  // In a capture: becomes true when its graph can never run again, since it and all that was made of it are destroyed.
  [[nodiscard]] virtual GraphIsGone watch_graph() { return nullptr; }
  // True when nothing is enqueued or running.
  [[nodiscard]] virtual bool idle() const noexcept = 0;
  // The cudaStream_t that kernels are launched on; null for CPU streams.
  [[nodiscard]] virtual void* native_handle() const noexcept { return nullptr; }
  // Blocks the host until everything enqueued has run.
  void synchronize() { record().wait(); }
};

// For a task of a worker stream that waits: runs the next task of its stream, which waits behind it. False when there
// is none, and in any other thread.
bool run_next_task();

// Which native stream something was used on, as far as it was a single one.
class UsedOn {
 public:
  void note(void* native_handle) noexcept {
    several_ = several_ || (handle_ && *handle_ != native_handle);
    handle_ = native_handle;
  }
  [[nodiscard]] bool only(void* native_handle) const noexcept { return !several_ && handle_ == native_handle; }

 private:
  std::optional<void*> handle_;
  bool several_ = false;
};

// The stream that a caller computes on, handed to whatever has to come after its work or before it.
// The compute stream of a CPU rank is the caller itself: everything runs before the call returns.
[[nodiscard]] std::shared_ptr<Stream> make_caller_stream();

// A side lane on CPU: one thread that runs tasks first in, first out, and sleeps when there are none.
// `name` shows in /proc and in debuggers (15 characters). The destructor runs what is still enqueued, then joins.
// In a forked child there is no such thread: enqueue() throws Closed, and nothing is waited for.
[[nodiscard]] std::shared_ptr<Stream> make_worker_stream(const std::string& name);

}  // namespace hpcomm
