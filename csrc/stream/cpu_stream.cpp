// Streams of a CPU rank: the caller itself, and FIFO worker threads.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "base/thread.h"
#include "stream/stream.h"

namespace hpcomm {

namespace {

class CallerStream final : public Stream {
 public:
  [[nodiscard]] Device device() const noexcept override { return {}; }
  void enqueue(Task task) override { task(); }
  void hold(Keepalive) override {}  // everything has run
  [[nodiscard]] Event record() override { return {}; }
  void wait(const Event& event) override { event.wait(); }
  [[nodiscard]] bool is_current() const noexcept override { return true; }
  [[nodiscard]] bool idle() const noexcept override { return true; }
};

class Flag final : public EventState {
 public:
  [[nodiscard]] bool done() const override {
    std::lock_guard lock(mutex_);
    return set_;
  }
  [[nodiscard]] bool wait_until(Deadline deadline) const override {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline, [this] { return set_; });
  }
  void set() {
    // Notified under the lock: a waiter may destroy this object as soon as it sees the flag.
    std::lock_guard lock(mutex_);
    set_ = true;
    changed_.notify_all();
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool set_ = false;
};

class WorkerStream final : public Stream {
 public:
  explicit WorkerStream(const std::string& name) : thread_(name, run, queue_) {}

  ~WorkerStream() override {
    if (forked()) {
      return;  // the thread is the parent's, and may hold the lock; what was enqueued stays with it
    }
    {
      std::lock_guard lock(queue_->mutex);
      queue_->stopping = true;
    }
    queue_->ready.notify_one();
    if (is_current()) {
      // The last reference went away inside one of our own tasks; the thread ends by itself once the queue is empty.
      thread_.detach();
    } else {
      thread_.join();
    }
  }

  [[nodiscard]] Device device() const noexcept override { return {}; }

  void enqueue(Task task) override {
    if (forked()) {
      throw Error(ErrorKind::kClosed, "a task for a lane in a forked child: its thread is the parent's");
    }
    // Held here too: when the task has run, somebody else may destroy the stream before notify_one() returns.
    const std::shared_ptr<Queue> queue = queue_;
    {
      std::lock_guard lock(queue->mutex);
      queue->tasks.push_back(std::move(task));
      queue->unfinished.fetch_add(1, std::memory_order_acq_rel);
    }
    queue->ready.notify_one();
  }

  void hold(Keepalive memory) override {
    if (forked()) {
      return;
    }
    enqueue([memory = std::move(memory)] {});
  }

  [[nodiscard]] Event record() override {
    if (forked()) {
      return {};  // nothing runs here that could be waited for
    }
    auto flag = std::make_shared<Flag>();
    enqueue([flag] { flag->set(); });
    return Event(flag);
  }

  void wait(const Event& event) override {
    if (!forked() && !event.done()) {
      enqueue([event] { event.wait(); });
    }
  }

  [[nodiscard]] bool is_current() const noexcept override { return thread_.is_current(); }

  [[nodiscard]] bool idle() const noexcept override { return queue_->unfinished.load(std::memory_order_acquire) == 0; }

  // In the thread of any.
  static bool run_next() {
    if (own == nullptr) {
      return false;
    }
    std::unique_lock lock(own->mutex);
    if (own->tasks.empty()) {
      return false;
    }
    run_first(*own, lock);
    return true;
  }

 private:
  // Shared with the thread, which outlives the stream when that is destroyed by one of its own tasks.
  struct Queue {
    std::mutex mutex;
    std::condition_variable ready;
    std::deque<Task> tasks;
    std::atomic<std::size_t> unfinished = 0;  // waiting or running; read without the lock
    bool stopping = false;
  };

  [[nodiscard]] bool forked() const noexcept { return fork_generation() != generation_; }

  static void run(const std::shared_ptr<Queue>& queue) {
    own = queue.get();
    std::unique_lock lock(queue->mutex);
    for (;;) {
      queue->ready.wait(lock, [&queue] { return queue->stopping || !queue->tasks.empty(); });
      if (queue->tasks.empty()) {
        return;
      }
      run_first(*queue, lock);
    }
  }

  static void run_first(Queue& queue, std::unique_lock<std::mutex>& lock) {
    {
      Task task = std::move(queue.tasks.front());
      queue.tasks.pop_front();
      lock.unlock();
      try {
        task();
      } catch (const std::exception& error) {
        // Tasks promise not to throw; losing the process over a broken promise would lose the message too.
        std::fprintf(stderr, "hpcomm: bug: a stream task threw: %s\n", error.what());
      } catch (...) {
        std::fprintf(stderr, "hpcomm: bug: a stream task threw something that is no std::exception\n");
      }
    }  // the task and what it keeps alive end here, outside the lock
    queue.unfinished.fetch_sub(1, std::memory_order_acq_rel);
    lock.lock();
  }

  static thread_local Queue* own;  // of this thread

  const std::uint32_t generation_ = fork_generation();
  const std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  Thread thread_;  // last: it starts when everything above exists
};

thread_local WorkerStream::Queue* WorkerStream::own = nullptr;

}  // namespace

bool run_next_task() { return WorkerStream::run_next(); }

std::shared_ptr<Stream> make_caller_stream() { return std::make_shared<CallerStream>(); }

std::shared_ptr<Stream> make_worker_stream(const std::string& name) { return std::make_shared<WorkerStream>(name); }

}  // namespace hpcomm
