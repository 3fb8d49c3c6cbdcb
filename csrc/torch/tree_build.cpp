// Builds trees from structures that came from another rank, with the classes of this program, calling none of them.
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "engine/structure.h"
#include "torch/tree.h"
#include "torch/tree_place.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

py::object find_class(const std::string& name) {
  py::object found = named(name);
  if (!found || PyType_Check(found.ptr()) == 0) {
    throw Misfit{{}, str("a ", name, ", which this rank's program has not imported")};
  }
  return found;
}

[[noreturn]] void differs(const std::string& name) {
  throw Misfit{{}, str("a ", name, " with other fields than this rank's")};
}

// The structure has been walked by summary_of(): only names and texts can be wrong here.
class Builder {
 public:
  Builder(std::string_view structure, std::vector<at::Tensor> tensors)
      : reader_(structure), tensors_(std::move(tensors)) {}

  py::object build() {
    const Node node = reader_.node();
    switch (node) {
      case Node::kTensor:
        return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensors_[next_++])));
      case Node::kNone:
        return py::none();
      case Node::kTrue:
        return py::bool_(true);
      case Node::kFalse:
        return py::bool_(false);
      case Node::kInteger:
        return checked(PyLong_FromLongLong(reader_.integer()));
      case Node::kBigInteger:
        return checked(PyLong_FromString(std::string(reader_.text()).c_str(), nullptr, 16));
      case Node::kReal:
        return checked(PyFloat_FromDouble(reader_.real()));
      case Node::kComplex: {
        const double real = reader_.real();
        return checked(PyComplex_FromDoubles(real, reader_.real()));
      }
      case Node::kText: {
        const std::string_view text = reader_.text();
        return checked(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr));
      }
      case Node::kList: {
        const std::uint32_t count = reader_.count();
        py::list list(count);
        for (std::uint32_t i = 0; i < count; ++i) {
          PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), build_item(i).release().ptr());
        }
        return list;
      }
      case Node::kTuple:
        return build_tuple();
      case Node::kDict: {
        const std::uint32_t count = reader_.count();
        py::dict dict;
        for (std::uint32_t i = 0; i < count; ++i) {
          const py::object key = build();
          dict[key] = build_entry(key);
        }
        require_all(dict, count);
        return dict;
      }
      case Node::kOrderedDict: {
        const std::uint32_t count = reader_.count();
        const py::object dict = checked(PyODict_New());
        for (std::uint32_t i = 0; i < count; ++i) {
          const py::object key = build();
          if (PyODict_SetItem(dict.ptr(), key.ptr(), build_entry(key).ptr()) != 0) {
            throw py::error_already_set();
          }
        }
        require_all(dict, count);
        return dict;
      }
      case Node::kNamedTuple: {
        const std::string name = read_name();
        const py::tuple items = build_tuple();
        const std::size_t fields = std::min(name.find('('), name.size());
        const py::object type = find_class(name.substr(0, fields));
        auto* const found = reinterpret_cast<PyTypeObject*>(type.ptr());
        const bool is_one = PyType_IsSubtype(found, &PyTuple_Type) != 0 && py::hasattr(type, "_fields");
        if (!is_one || py::len(type.attr("_fields")) != items.size() || fields_text(found) != name.substr(fields)) {
          differs(name);
        }
        return py::handle(reinterpret_cast<PyObject*>(&PyTuple_Type)).attr("__new__")(type, items);
      }
      case Node::kDataclass:
        return build_dataclass();
    }
    throw Error(ErrorKind::kProtocol, "message structure has an unknown kind of node");
  }

 private:
  template <typename Step>
  py::object build_below(const Step& step) {
    try {
      return build();
    } catch (Misfit& misfit) {
      misfit.place.insert(0, step());
      throw;
    }
  }
  py::object build_item(std::uint32_t i) {
    return build_below([i] { return str("[", i, "]"); });
  }
  py::object build_entry(const py::object& key) {
    return build_below([&key] { return step_of(key); });
  }

  // Of a key that comes twice the first value would be lost, which a Draft still writes to.
  static void require_all(const py::object& dict, std::uint32_t count) {
    if (PyDict_Size(dict.ptr()) != static_cast<Py_ssize_t>(count)) {
      throw Error(ErrorKind::kProtocol, "message structure holds a dict with a key twice");
    }
  }

  static py::object checked(PyObject* made) {
    if (made == nullptr && PyErr_ExceptionMatches(PyExc_MemoryError) != 0) {
      throw py::error_already_set();
    }
    if (made == nullptr) {
      PyErr_Clear();
      throw Error(ErrorKind::kProtocol, "message structure holds a damaged text or number");
    }
    return py::reinterpret_steal<py::object>(made);
  }

  // Of a class or a field. Checked here: errors quote it, and are texts of Python themselves.
  std::string read_name() {
    const std::string_view text = reader_.text();
    (void)checked(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr));
    return std::string(text);
  }

  py::tuple build_tuple() {
    const std::uint32_t count = reader_.count();
    py::tuple tuple(count);
    for (std::uint32_t i = 0; i < count; ++i) {
      PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), build_item(i).release().ptr());
    }
    return tuple;
  }

  // Neither __init__ nor __post_init__ runs: the object gets the fields that were sent, also of a frozen class.
  py::object build_dataclass() {
    const std::string name = read_name();
    const std::uint32_t count = reader_.count();
    std::vector<std::pair<std::string, py::object>> fields;
    for (std::uint32_t i = 0; i < count; ++i) {
      std::string field = read_name();
      py::object value = build_below([&field] { return str(".", field); });
      fields.emplace_back(std::move(field), std::move(value));
    }
    const py::object type = find_class(name);
    const py::module_ dataclasses = py::module_::import("dataclasses");
    if (!dataclasses.attr("is_dataclass")(type).cast<bool>()) {
      differs(name);
    }
    const auto own = dataclasses.attr("fields")(type).cast<py::tuple>();
    if (own.size() != fields.size()) {
      differs(name);
    }
    const py::handle object(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
    py::object made = object.attr("__new__")(type);
    for (std::size_t i = 0; i < fields.size(); ++i) {
      if (py::handle(own[i]).attr("name").cast<std::string>() != fields[i].first) {
        differs(name);
      }
      if (PyObject_GenericSetAttr(made.ptr(), py::str(fields[i].first).ptr(), fields[i].second.ptr()) != 0) {
        throw py::error_already_set();
      }
    }
    return made;
  }

  StructureReader reader_;
  std::vector<at::Tensor> tensors_;
  std::size_t next_ = 0;
};

}  // namespace

std::string step_of(py::handle key) { return str("[", py::repr(key).cast<std::string>(), "]"); }

// Of a tree that holds itself, or a damaged one, very many levels: the ends of a long way tell most.
std::string Misfit::to_text() const {
  constexpr std::size_t kMost = 200;
  constexpr std::size_t kEnd = 80;
  return str("message",
             place.size() <= kMost ? place : str(place.substr(0, kEnd), " ... ", place.substr(place.size() - kEnd)),
             ": ", why);
}

py::object named(const std::string& name) {
  const std::size_t colon = name.find(':');
  py::object found;
  if (colon != std::string::npos) {
    const py::dict modules = py::module_::import("sys").attr("modules");
    const py::str module(name.substr(0, colon));
    if (modules.contains(module)) {
      found = modules[module];
      std::string_view rest = std::string_view(name).substr(colon + 1);
      while (found && !rest.empty()) {
        const std::size_t dot = rest.find('.');
        const std::string part(rest.substr(0, dot));
        rest = dot == std::string_view::npos ? std::string_view() : rest.substr(dot + 1);
        // Not by getattr(): a module's __getattr__ may import.
        const py::object members = py::getattr(found, "__dict__", py::dict());
        found = members.contains(part) ? py::object(members[py::str(part)]) : py::object();
      }
    }
  }
  return found;
}

py::object unflatten(std::string_view structure, std::vector<at::Tensor> tensors) {
  return unflatten(structure, summary_of(structure).tensors, std::move(tensors));
}

py::object unflatten(std::string_view structure, std::size_t places, std::vector<at::Tensor> tensors) {
  if (places != tensors.size()) {
    throw Error(ErrorKind::kProtocol,
                str("message structure has places for ", places, " tensors, the message ", tensors.size()));
  }
  try {
    return Builder(structure, std::move(tensors)).build();
  } catch (const Misfit& misfit) {
    throw Error(ErrorKind::kSchemaMismatch, misfit.to_text());
  } catch (const py::error_already_set& error) {
    // What a class may answer to fields that it does not take. Anything else is not the message's fault: a signal's
    // handler may raise in here, or memory run out.
    if (!error.matches(PyExc_TypeError) && !error.matches(PyExc_AttributeError) && !error.matches(PyExc_ValueError)) {
      throw;
    }
    throw Error(ErrorKind::kProtocol, str("message structure cannot be built: ", error.what()));
  }
}

}  // namespace hpcomm
