// The GIL at the seam: released wherever another thread may have to be waited for (waits, locks, calls that issue, the
// destruction of objects that join threads). No pybind11: it takes a file longer to compile than all of ATen.
#pragma once

#include <memory>
#include <utility>

namespace hpcomm {

// Drops the GIL if this thread holds it. A lane that still runs may be letting go of a tensor, which takes the GIL. In
// place of pybind11's: a thread that would take it back while the interpreter ends stays, see below.
class WithoutGil {
 public:
  WithoutGil() noexcept;
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil();

 private:
  void* state_;  // PyThreadState; null without the GIL
};

// Takes it, in a thread that a function of Python waits for.
class WithGil {
 public:
  WithGil() noexcept;
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;
  ~WithGil();

 private:
  int state_;  // PyGILState_STATE
};

// The same object, whose last reference from Python is dropped without the GIL.
template <typename T>
[[nodiscard]] std::shared_ptr<T> released_without_gil(std::shared_ptr<T> object) {
  T* address = object.get();
  return std::shared_ptr<T>(address, [owner = std::move(object)](T*) mutable {
    const WithoutGil scope;
    owner.reset();
  });
}

// OpOptions::poll of Python callers: raises what a signal handler raised (Ctrl-C), and tells of a wait that takes long
// (torch/long_waits.h). From any thread; handlers run in the main one, and no other takes the GIL here.
void check_signals();

// True once the interpreter is about to end: from then on CPython ends each thread but the main one that asks for the
// GIL, by an exception that no destructor lets pass: the process aborts.
[[nodiscard]] bool interpreter_ends() noexcept;
// With the GIL, once: where the module is imported.
void watch_for_end_of_interpreter();
// For a thread that is about to go back to Python, which takes the GIL in torch's code: it stays here if that is what
// ends now.
void stay_if_interpreter_ends() noexcept;

// Ends it in a thread of its own, which takes the GIL; at once in a forked child, which has no such thread.
void end_elsewhere(std::shared_ptr<void> last);
[[nodiscard]] bool holds_gil() noexcept;

// Whether the end of what only this thread holds takes the GIL, and it has not got it: a thread that moves the messages
// of others must not wait there, for as long as a program's C code likes. For types that have not said: no.
template <typename T>
struct EndsWithGil {
  [[nodiscard]] static bool now(const T& /*held*/) noexcept { return false; }
};

// What a lane may be the last to hold, and whose end may take the GIL: memory of numpy, a tensor, a storage that Python
// has seen. It stays for ever where the interpreter ends.
template <typename T>
struct HeldByLane {
  explicit HeldByLane(T held) : value(std::move(held)) {}
  HeldByLane(const HeldByLane&) = delete;
  HeldByLane& operator=(const HeldByLane&) = delete;
  ~HeldByLane() {
    if (interpreter_ends()) {
      static_cast<void>(new T(std::move(value)));
    } else if (EndsWithGil<T>::now(value)) {
      end_elsewhere(std::make_shared<T>(std::move(value)));
    }
  }

  T value;
};

}  // namespace hpcomm
