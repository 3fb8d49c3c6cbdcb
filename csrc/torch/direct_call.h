// Methods of bound classes as plain CPython functions: pybind11's dispatch takes a fourth of a small operation.
//
// A call whose arguments are of the usual types is made here; every other one, the wrong ones included, goes to the
// method that pybind11 made, which converts or says what it expects. So both accept the same, and both say the same.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/reduce_op.h"
#include "torch/bindings.h"
#include "torch/seconds.h"

namespace hpcomm::direct {

namespace py = pybind11;

// The arguments that are given, by parameter.
template <std::size_t kCount>
using Given = std::array<PyObject*, kCount>;

// One parameter: how a usual argument is read, and what counts when it is missing.
struct TensorParameter {
  using Value = const at::Tensor*;
  static std::optional<Value> read(PyObject* given) {
    // Subclasses of Tensor may have a say in what they are.
    return given != nullptr && THPVariable_CheckExact(given) ? std::optional(&THPVariable_Unpack(given)) : std::nullopt;
  }
  static const at::Tensor& pass(Value value) { return *value; }
};

struct OpParameter {
  using Value = ReduceOp;
  static std::optional<Value> read(PyObject* given) {
    if (given == nullptr) {
      return ReduceOp::kSum;
    }
    if (PyUnicode_CheckExact(given)) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMax, ReduceOp::kMin}) {
        if (PyUnicode_CompareWithASCIIString(given, to_string(op)) == 0) {
          return op;
        }
      }
    }
    return std::nullopt;
  }
  static ReduceOp pass(Value value) { return value; }
};

struct IntegerParameter {
  using Value = int;
  static std::optional<Value> read(PyObject* given) {
    if (given == nullptr || !PyLong_CheckExact(given)) {
      return std::nullopt;
    }
    int overflow = 0;
    const long number = PyLong_AsLongAndOverflow(given, &overflow);
    const int value = static_cast<int>(number);
    return overflow == 0 && value == number ? std::optional(value) : std::nullopt;
  }
  static int pass(Value value) { return value; }
};

struct FlagParameter {
  using Value = bool;
  static std::optional<Value> read(PyObject* given) {
    if (given == nullptr || given == Py_False) {
      return false;
    }
    return given == Py_True ? std::optional(true) : std::nullopt;
  }
  static bool pass(Value value) { return value; }
};

struct SecondsParameter {
  using Value = Seconds;
  static std::optional<Value> read(PyObject* given) {
    if (given == nullptr || given == Py_None) {
      return Seconds{};
    }
    return PyFloat_CheckExact(given) ? std::optional(Seconds{PyFloat_AS_DOUBLE(given)}) : std::nullopt;
  }
  static Seconds pass(Value value) { return value; }
};

struct ObjectParameter {
  using Value = py::handle;
  static std::optional<Value> read(PyObject* given) {
    return given == nullptr ? std::nullopt : std::optional(py::handle(given));
  }
  static py::handle pass(Value value) { return value; }
};

// Which parameter a C++ type is.
template <typename T>
struct ParameterOf;
template <>
struct ParameterOf<const at::Tensor&> : TensorParameter {};
template <>
struct ParameterOf<ReduceOp> : OpParameter {};
template <>
struct ParameterOf<int> : IntegerParameter {};
template <>
struct ParameterOf<bool> : FlagParameter {};
template <>
struct ParameterOf<Seconds> : SecondsParameter {};
template <>
struct ParameterOf<py::handle> : ObjectParameter {};

// The argument of every parameter, null where none is given; nothing where Python would complain.
template <std::size_t kCount>
std::optional<Given<kCount>> by_parameter(PyObject* const* arguments, Py_ssize_t count, PyObject* keywords,
                                          const std::array<const char*, kCount>& names, std::size_t positional) {
  const auto given_by_position = static_cast<std::size_t>(count);
  if (given_by_position > positional) {
    return std::nullopt;
  }
  Given<kCount> given{};
  for (std::size_t i = 0; i < given_by_position; ++i) {
    given[i] = arguments[i];
  }
  const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < named; ++i) {
    std::size_t place = 0;
    while (place < kCount && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(keywords, i), names[place]) != 0) {
      ++place;
    }
    if (place == kCount || given[place] != nullptr) {
      return std::nullopt;
    }
    given[place] = arguments[count + i];
  }
  return given;
}

// The first parameter of a function.
template <typename Function>
struct SelfOf;
template <typename Self, typename... Types>
struct SelfOf<py::object (*)(Self&, Types...)> {
  using Type = Self;
};

// Null when pybind11 has to look at it.
template <typename Self>
Self* self_of(PyObject* self) {
  // Python calls a method descriptor with instances of its type only. pybind11 keeps the object's address first.
  const auto* const instance = reinterpret_cast<const py::detail::instance*>(self);
  return instance->simple_layout ? static_cast<Self*>(instance->simple_value_holder[0]) : nullptr;
}

// A method: `Operation` says its function (kCall), its name (kName), its parameters by name (kParameters), and how many
// of them may be given by position (kPositional).
template <typename Operation>
class Direct {
 public:
  // Replaces the method of `type`, and keeps it for unusual calls.
  static void put_on(py::handle type) {
    const py::object method = type.attr(Operation::kName);
    // For as long as the process lives, like the type: a static object would be let go of without an interpreter.
    doc_ = new std::string(py::str(method.attr("__doc__")));
    definition_.ml_doc = doc_->c_str();
    general_ = method.inc_ref().ptr();
    const auto descriptor =
        py::reinterpret_steal<py::object>(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &definition_));
    if (!descriptor) {
      throw py::error_already_set();
    }
    py::setattr(type, Operation::kName, descriptor);
  }

 private:
  using Self = typename SelfOf<std::decay_t<decltype(Operation::kCall)>>::Type;

  static PyObject* call(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* keywords) {
    Self* const object = self_of<Self>(self);
    const auto given = by_parameter(arguments, count, keywords, Operation::kParameters, Operation::kPositional);
    try {
      if (object != nullptr && given) {
        if (auto result = read_and_call(Operation::kCall, *object, *given)) {
          return result->release().ptr();
        }
      }
    } catch (abi::__forced_unwind&) {
      throw;  // the thread is being ended
    } catch (...) {
      set_python_error();
      return nullptr;
    }
    std::vector<PyObject*> all{self};
    const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
    all.insert(all.end(), arguments, arguments + count + named);
    return PyObject_Vectorcall(general_, all.data(), static_cast<std::size_t>(count) + 1, keywords);
  }

  // Nothing when an argument is unusual.
  template <typename... Types, std::size_t kCount>
  static std::optional<py::object> read_and_call(py::object (*function)(Self&, Types...), Self& self,
                                                 const Given<kCount>& given) {
    static_assert(sizeof...(Types) == kCount);
    return read_and_call(function, self, given, std::make_index_sequence<kCount>());
  }
  template <typename... Types, std::size_t kCount, std::size_t... kPlaces>
  static std::optional<py::object> read_and_call(py::object (*function)(Self&, Types...), Self& self,
                                                 const Given<kCount>& given, std::index_sequence<kPlaces...>) {
    const auto values = std::make_tuple(ParameterOf<Types>::read(given[kPlaces])...);
    if (!(std::get<kPlaces>(values).has_value() && ...)) {
      return std::nullopt;
    }
    return function(self, ParameterOf<Types>::pass(*std::get<kPlaces>(values))...);
  }

  // CPython tells the kinds of functions apart by the flags.
  static inline PyMethodDef definition_{Operation::kName,
                                        reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)),
                                        METH_FASTCALL | METH_KEYWORDS, nullptr};
  static inline std::string* doc_ = nullptr;
  static inline PyObject* general_ = nullptr;
};

}  // namespace hpcomm::direct
