// The GIL, and the signals that Python looks at with it.
#include "torch/gil.h"

#include <pthread.h>
#include <unistd.h>

#include <pybind11/pybind11.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "torch/long_waits.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

using Clock = std::chrono::steady_clock;

std::atomic<bool> ends = false;
std::atomic<pid_t> ending_thread = 0;        // which ends it
std::atomic<Clock::rep> nobody_returns = 0;  // until then, though CPython does not say yet that it ends
std::atomic<Clock::rep> last_way_back = 0;   // when a thread went where torch takes the GIL
std::atomic<int> returning = 0;              // threads that have looked whether it ends, and have not got the GIL yet

// What other callbacks at the exit take, which come after ours.
constexpr std::chrono::seconds kOtherCallbacks(5);
// A thread that is told to go on takes the GIL within that.
constexpr std::chrono::milliseconds kWayBack(20);

bool is_main_thread() noexcept { return ::gettid() == ::getpid(); }

bool is_finalizing() noexcept {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

Clock::rep now() noexcept { return Clock::now().time_since_epoch().count(); }

// The one that ends it goes on. Who clears the callbacks at the exit leaves only a guess: the main one.
bool ends_it() noexcept {
  const pid_t known = ending_thread;
  return known == 0 ? is_main_thread() : ::gettid() == known;
}

// CPython would end this thread where it asked for the GIL.
bool has_to_stay() noexcept { return (is_finalizing() || (ends && now() < nobody_returns)) && !ends_it(); }

// Before the GIL is taken, and `returning` is counted down after that: whoever ends the interpreter waits for those who
// had not heard of it.
void begin_return() noexcept {
  for (;;) {
    returning.fetch_add(1);
    if (!has_to_stay()) {
      return;
    }
    returning.fetch_sub(1);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void end_return() noexcept { returning.fetch_sub(1); }

void end() {
  ending_thread = ::gettid();
  nobody_returns = (Clock::now() + kOtherCallbacks).time_since_epoch().count();
  ends = true;
  PyThreadState* const state = PyEval_SaveThread();
  const auto patience = Clock::now() + kOtherCallbacks;
  while (returning > 0 && Clock::now() < patience) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  std::this_thread::sleep_until(Clock::time_point(Clock::duration(last_way_back)) + kWayBack);
  PyEval_RestoreThread(state);
}

// One thread that ends what takes the GIL. For ever: at the exit it may be in the midst of it.
class Reaper {
 public:
  Reaper() {
    std::thread([this] { run(); }).detach();
  }

  void take(std::shared_ptr<void> last) {
    if (fork_generation() != generation_) {
      return;  // the mutex may be held by a thread that only the parent has
    }
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(std::move(last));
    }
    changed_.notify_one();
  }

 private:
  [[noreturn]] void run() {
    for (;;) {
      std::vector<std::shared_ptr<void>> ended;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !waiting_.empty(); });
        ended.swap(waiting_);
      }
      const WithGil gil;
      ended.clear();
    }
  }

  const std::uint32_t generation_ = fork_generation();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<void>> waiting_;
};

}  // namespace

WithoutGil::WithoutGil() noexcept : state_(PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}

WithoutGil::~WithoutGil() {
  if (state_ != nullptr) {
    begin_return();
    PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
    end_return();
  }
}

WithGil::WithGil() noexcept {
  begin_return();
  state_ = PyGILState_Ensure();
  end_return();
}

WithGil::~WithGil() { PyGILState_Release(static_cast<PyGILState_STATE>(state_)); }

void check_signals() {
  look_at_wait(is_main_thread());
  if (!is_main_thread()) {
    return;
  }
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

void stay_if_interpreter_ends() noexcept {
  last_way_back = now();
  begin_return();
  end_return();
}

bool interpreter_ends() noexcept { return ends.load(std::memory_order_relaxed); }

void watch_for_end_of_interpreter() {
  // A thread that was about to return when the process was forked is not in the child.
  (void)::pthread_atfork(nullptr, nullptr, [] { returning = 0; });
  // Registered early, so that it runs late: what jobs and meshes do at the exit comes before.
  py::module_::import("hpcomm.at_exit").attr("register")(py::cpp_function(&end));
}

bool holds_gil() noexcept { return PyGILState_Check() != 0; }

void end_elsewhere(std::shared_ptr<void> last) {
  try {
    static auto* const reaper = new Reaper;
    reaper->take(std::move(last));
  } catch (const std::exception&) {  // no thread is to be had: it ends here
  }
}

}  // namespace hpcomm
