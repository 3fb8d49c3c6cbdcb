// What both ways of a tree share: how errors name a place in it, and how classes are named.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace hpcomm {

// Behind the name of a named tuple's class: its fields, "(a, b)".
inline std::string fields_text(PyTypeObject* type) {
  const pybind11::handle handle(reinterpret_cast<PyObject*>(type));
  std::string text = "(";
  for (const pybind11::handle field : pybind11::tuple(handle.attr("_fields"))) {
    text += (text.size() == 1 ? "" : ", ") + pybind11::str(field).cast<std::string>();
  }
  return text + ")";
}

// What cannot be flattened or built. Only then is the way to it needed: each level adds its step while this passes.
struct Misfit {
  std::string place;  // below "message"
  std::string why;

  [[nodiscard]] std::string to_text() const;
};

// "['hidden']"
[[nodiscard]] std::string step_of(pybind11::handle key);

// What this program has under the name of a class, "module:qualified name", if it is imported already: a peer must not
// make us import anything. Or null.
[[nodiscard]] pybind11::object named(const std::string& name);

}  // namespace hpcomm
