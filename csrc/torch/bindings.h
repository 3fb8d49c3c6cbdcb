// One bind_*.cpp per subject; module.cpp is the list.
#pragma once

#include <pybind11/pybind11.h>

#include "comm/work.h"

namespace hpcomm {

void bind_errors(pybind11::module_& module);
void bind_base(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_control(pybind11::module_& module);
void bind_comm(pybind11::module_& module);
void bind_engine(pybind11::module_& module);

// Waits for `work` without the GIL, looks at signals (Ctrl-C) twenty times a second, and throws kTimedOut when
// `seconds` (no limit when negative) have passed.
void wait_for(const Work& work, double seconds);

// A deadline `seconds` from now.
[[nodiscard]] Deadline in_seconds(double seconds);

}  // namespace hpcomm
