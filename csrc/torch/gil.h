// The GIL at the seam: released wherever another thread may have to be waited for (waits, locks, calls that issue, the
// destruction of objects that join threads), and taken by whatever touches Python in a thread of ours.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace hpcomm {

// Drops the GIL if this thread holds it. A lane that still runs may be letting go of a tensor, which takes the GIL.
class WithoutGil {
 public:
  WithoutGil() : state_(PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }

 private:
  PyThreadState* state_;
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

// A function of Python that a thread without the GIL may let go of.
[[nodiscard]] inline std::shared_ptr<pybind11::function> released_with_gil(pybind11::function function) {
  return {new pybind11::function(std::move(function)), [](pybind11::function* last) {
            const pybind11::gil_scoped_acquire gil;
            delete last;
          }};
}

}  // namespace hpcomm
