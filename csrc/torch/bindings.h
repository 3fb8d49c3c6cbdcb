// One bind_*.cpp per subject; module.cpp is the list.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>

#include "comm/nccl/nccl_communicator.h"
#include "comm/work.h"
#include "torch/gil.h"

// Python knows Work alone and no subclass: looking for one costs a tenth of a small operation.
template <>
struct pybind11::polymorphic_type_hook<hpcomm::Work> {
  static const void* get(const hpcomm::Work* work, const std::type_info*& type) {
    type = nullptr;
    return work;
  }
};

namespace hpcomm {

void bind_errors(pybind11::module_& module);
void bind_base(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_pack(pybind11::module_& module);
void bind_control(pybind11::module_& module);
void bind_comm(pybind11::module_& module);
void bind_channel(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_ddp(pybind11::module_& module);
void bind_backend(pybind11::module_& module);

// HPCOMM_NCCL_CTAS as Python has read it: by lane ("*": all others) min_ctas, max_ctas, cga_cluster_size.
using LimitsByLane = std::map<std::string, std::tuple<int, int, int>>;
[[nodiscard]] NcclOptions nccl_options(const LimitsByLane& limits);

// What comes next in the calling program comes after `work`: on CPU the host waits, without the GIL, and looks at
// signals (Ctrl-C) twenty times a second; on CUDA the current stream waits and the host goes on, unless there is a
// limit. Throws the error of `work`, on CUDA if it is known by now; kTimedOut when `seconds` (no limit when negative)
// have passed.
void wait_for(const Work& work, double seconds);
// The same for the host on every device.
void block_on(const Work& work, double seconds);

// OpOptions::poll of Python callers: takes the GIL and raises what a signal handler raised (Ctrl-C).
void check_signals();

// In a catch block of a function that CPython calls itself: what was thrown, as Python's current error.
void set_python_error() noexcept;

// A deadline `seconds` from now; far away when negative.
[[nodiscard]] Deadline in_seconds(double seconds);

// Calls `step(until)` without the GIL until it says that it is over, and looks at signals in between; false when the
// deadline came first.
template <typename Step>
bool wait_in_slices(Deadline deadline, const Step& step) {
  constexpr auto kSignalPoll = std::chrono::milliseconds(50);
  for (;;) {
    bool over = false;
    {
      const WithoutGil scope;
      over = step(std::min(deadline, Clock::now() + kSignalPoll));
    }
    if (over) {
      return true;
    }
    if (PyErr_CheckSignals() != 0) {
      throw pybind11::error_already_set();
    }
    if (Clock::now() >= deadline) {
      return false;
    }
  }
}

}  // namespace hpcomm
