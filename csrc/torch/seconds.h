// A time limit as Python gives it.
#pragma once

#include <pybind11/pybind11.h>

namespace hpcomm {

// A number, or None, which is below 0: what that means is the callee's to say.
struct Seconds {
  double value = -1.0;
};

}  // namespace hpcomm

template <>
struct pybind11::detail::type_caster<hpcomm::Seconds> {
  PYBIND11_TYPE_CASTER(hpcomm::Seconds, const_name("float | None"));

  bool load(handle given, bool convert) {
    make_caster<double> number;
    if (!given.is_none()) {
      if (!number.load(given, convert)) {
        return false;
      }
      value.value = cast_op<double>(number);
    }
    return true;
  }
  static handle cast(hpcomm::Seconds seconds, return_value_policy /*policy*/, handle /*parent*/) {
    return seconds.value < 0 ? none().release() : float_(seconds.value).release();
  }
};
