// The GIL at the seam: released wherever another thread may have to be waited for (waits, locks, calls that issue, the
// destruction of objects that join threads). No pybind11: it takes a file longer to compile than all of ATen.
#pragma once

#include <memory>
#include <utility>

namespace hpcomm {

// Drops the GIL if this thread holds it. A lane that still runs may be letting go of a tensor, which takes the GIL.
class WithoutGil {
 public:
  WithoutGil() noexcept;
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil();

 private:
  void* state_;  // PyThreadState; null without the GIL
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

// OpOptions::poll of Python callers: takes the GIL and raises what a signal handler raised (Ctrl-C). From any thread.
void check_signals();

}  // namespace hpcomm
