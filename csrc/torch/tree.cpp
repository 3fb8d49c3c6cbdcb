// Walks Python objects with the C API: a message of 32 tensors is flattened in a microsecond, not in twenty.
#include <torch/csrc/autograd/python_variable.h>

#include <limits>

#include "base/error.h"
#include "engine/structure.h"
#include "torch/tensor.h"
#include "torch/tree.h"
#include "torch/tree_place.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

// Not of the node itself: some answer to every name.
bool has_class_attribute(PyObject* node, const char* name) {
  return PyObject_HasAttrString(reinterpret_cast<PyObject*>(Py_TYPE(node)), name) != 0;
}

// What a type's name means to the other end: "module:qualified name".
std::string name_of(PyTypeObject* type) {
  const py::handle handle(reinterpret_cast<PyObject*>(type));
  return str(py::str(handle.attr("__module__")).cast<std::string>(), ":",
             py::str(handle.attr("__qualname__")).cast<std::string>());
}

// Of something like what travels, how to make that of it.
const char* remedy_for(PyObject* node) {
  return PyTuple_Check(node)                    ? "; send tuple(...) of it"
         : PyList_Check(node)                   ? "; send list(...) of it"
         : PyDict_Check(node)                   ? "; send dict(...) of it"
         : PyObject_HasAttrString(node, "item") ? "; send its .item(), or a tensor"
                                                : "";
}

class Flattener {
 public:
  explicit Flattener(FlatTree& flat) : flat_(flat) {}

  void visit(PyObject* node, int depth) {
    if (depth > kMaxDepth) {
      refuse(str("is deeper than ", kMaxDepth, " levels"));
    }
    if (node == Py_None) {
      return put(Node::kNone);
    }
    if (THPVariable_Check(node)) {
      put(Node::kTensor);
      if (!THPVariable_CheckExact(node) && !flat_.subclass) {
        flat_.subclass.emplace(flat_.leaves.size(), Py_TYPE(node)->tp_name);
      }
      flat_.leaves.push_back(py::reinterpret_borrow<py::object>(node));
      return;
    }
    if (PyBool_Check(node)) {
      return put(node == Py_True ? Node::kTrue : Node::kFalse);
    }
    if (PyLong_CheckExact(node)) {
      return put_integer(node);
    }
    if (PyUnicode_CheckExact(node)) {
      put(Node::kText);
      return put_text(node);
    }
    if (PyFloat_CheckExact(node)) {
      put(Node::kReal);
      return put_bytes(PyFloat_AS_DOUBLE(node));
    }
    if (PyComplex_CheckExact(node)) {
      put(Node::kComplex);
      put_bytes(PyComplex_RealAsDouble(node));
      return put_bytes(PyComplex_ImagAsDouble(node));
    }
    if (PyList_CheckExact(node)) {
      put(Node::kList);
      return put_items(node, depth);
    }
    if (PyTuple_CheckExact(node)) {
      put(Node::kTuple);
      return put_items(node, depth);
    }
    if (PyDict_CheckExact(node)) {
      return put_dict(node, depth);
    }
    if (PyODict_CheckExact(node)) {
      return put_ordered_dict(node, depth);
    }
    if (PyTuple_Check(node) && has_class_attribute(node, "_fields")) {
      put(Node::kNamedTuple);
      put_class(node, fields_text(Py_TYPE(node)));
      return put_items(node, depth);
    }
    const bool is_container = PyTuple_Check(node) || PyList_Check(node) || PyDict_Check(node) || PyType_Check(node);
    if (!is_container && has_class_attribute(node, "__dataclass_fields__")) {
      require_plain_object(node);
      return put_dataclass(node, depth);
    }
    refuse(str(Py_TYPE(node)->tp_name,
               " cannot be sent; messages hold tensors, None, numbers, strings, and lists, tuples, dicts, named tuples "
               "and dataclasses of them",
               remedy_for(node)));
  }

 private:
  [[noreturn]] static void refuse(const std::string& why) { throw Misfit{{}, why}; }

  // What else its memory holds would be lost, and the receiver could not make one: it calls no class. Classes written
  // in Python all free their objects in one way, others in ways of their own; of these some hold nothing
  // (typing.Generic, from Python 3.12 on).
  static void require_plain_object(PyObject* node) {
    const PyTypeObject* type = Py_TYPE(node);
    if (PyObject_HasAttrString(reinterpret_cast<PyObject*>(Py_TYPE(node)), "__members__")) {
      refuse(str(type->tp_name, " is an Enum, whose members are not made anew; send the value"));
    }
    while (type != nullptr && type != &PyBaseObject_Type && type->tp_dealloc == Py_TYPE(node)->tp_dealloc) {
      type = type->tp_base;
    }
    if (type != nullptr && (type->tp_basicsize > PyBaseObject_Type.tp_basicsize || type->tp_itemsize > 0)) {
      refuse(str(Py_TYPE(node)->tp_name, " is a dataclass made from ", type->tp_name,
                 ", of which only fields would travel; send those in a dataclass of their own"));
    }
  }

  void put(Node node) { flat_.structure.push_back(static_cast<char>(node)); }
  template <typename T>
  void put_bytes(T value) {
    flat_.structure.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void put_count(Py_ssize_t count) {
    if (count > std::numeric_limits<std::int32_t>::max()) {
      refuse("is too long");
    }
    put_bytes(static_cast<std::uint32_t>(count));
  }
  // What a message was packed from has driven the objects around it out of the nearest cache; to count a reference
  // waits for one after the other.
  static void fetch(PyObject* node) {
    if (THPVariable_CheckExact(node)) {
      const auto* const impl = reinterpret_cast<const char*>(THPVariable_Unpack(node).unsafeGetTensorImpl());
      for (std::size_t at = 0; at < sizeof(c10::TensorImpl); at += 64) {
        __builtin_prefetch(impl + at);
      }
    }
  }
  // Most trees are one container full of tensors.
  void make_room(Py_ssize_t count, int depth) {
    if (depth == 0) {
      flat_.leaves.reserve(static_cast<std::size_t>(count));
    }
  }
  void put_text(std::string_view text) {
    put_count(static_cast<Py_ssize_t>(text.size()));
    flat_.structure += text;
  }
  void put_text(PyObject* text) {
    Py_ssize_t length = 0;
    const char* bytes = PyUnicode_AsUTF8AndSize(text, &length);
    if (bytes == nullptr) {
      PyErr_Clear();
      refuse("str has characters that UTF-8 cannot hold");
    }
    put_text(std::string_view(bytes, static_cast<std::size_t>(length)));
  }
  void put_integer(PyObject* node) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(node, &overflow);
    if (overflow == 0) {
      put(Node::kInteger);
      return put_bytes(static_cast<std::int64_t>(value));
    }
    put(Node::kBigInteger);
    // Hexadecimal: Python limits the length of decimal numbers that it converts.
    const auto text = py::reinterpret_steal<py::object>(PyNumber_ToBase(node, 16));
    put_text(text.ptr());
  }

  void put_items(PyObject* items, int depth) {
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
    put_count(count);
    make_room(count, depth);
    for (Py_ssize_t i = 0; i < count; ++i) {
      fetch(PySequence_Fast_GET_ITEM(items, i));
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
      require_unchanged(items, i < PySequence_Fast_GET_SIZE(items));
      const auto item = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(items, i));
      below(item.ptr(), depth, [i] { return str("[", i, "]"); });
    }
    require_unchanged(items, PySequence_Fast_GET_SIZE(items) == count);
  }

  void put_dict(PyObject* dict, int depth) {
    const Py_ssize_t count = PyDict_Size(dict);
    put(Node::kDict);
    put_count(count);
    make_room(count, depth);
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &key, &value) != 0) {
      fetch(value);
    }
    position = 0;
    Py_ssize_t put = 0;
    while (PyDict_Next(dict, &position, &key, &value) != 0) {
      const auto kept_key = py::reinterpret_borrow<py::object>(key);
      const auto kept_value = py::reinterpret_borrow<py::object>(value);
      put_entry(key, value, depth);
      ++put;
      require_unchanged(dict, PyDict_Size(dict) == count);
    }
    require_unchanged(dict, put == count);
  }

  // Fields may be properties, whose code runs here, and other threads run meanwhile.
  static void require_unchanged(PyObject* node, bool is_unchanged) {
    if (!is_unchanged) {
      refuse(str("a ", Py_TYPE(node)->tp_name, " of it changed while it was sent"));
    }
  }

  // Its order is not always that of the dict beneath.
  void put_ordered_dict(PyObject* dict, int depth) {
    const auto items = py::reinterpret_steal<py::list>(PyMapping_Items(dict));
    put(Node::kOrderedDict);
    put_count(static_cast<Py_ssize_t>(items.size()));
    make_room(static_cast<Py_ssize_t>(items.size()), depth);
    for (const py::handle item : items) {
      put_entry(PyTuple_GET_ITEM(item.ptr(), 0), PyTuple_GET_ITEM(item.ptr(), 1), depth);
    }
  }

  void put_entry(PyObject* key, PyObject* value, int depth) {
    if (PyUnicode_CheckExact(key)) {
      put(Node::kText);
      put_text(key);
    } else if (PyBool_Check(key)) {
      put(key == Py_True ? Node::kTrue : Node::kFalse);
    } else if (PyLong_CheckExact(key)) {
      put_integer(key);
    } else {
      refuse(str("a dict key of type ", Py_TYPE(key)->tp_name, "; keys are str or int"));
    }
    below(value, depth, [key] { return step_of(key); });
  }

  void put_dataclass(PyObject* node, int depth) {
    put(Node::kDataclass);
    put_class(node);
    const auto fields = py::module_::import("dataclasses").attr("fields")(py::handle(node)).cast<py::tuple>();
    put_count(static_cast<Py_ssize_t>(fields.size()));
    for (const py::handle field : fields) {
      const py::object name = field.attr("name");
      put_text(name.ptr());
      const auto value = py::reinterpret_steal<py::object>(PyObject_GetAttr(node, name.ptr()));
      if (!value) {
        PyErr_Clear();
        refuse(str("the field ", name.cast<std::string>(), " is not set"));
      }
      below(value.ptr(), depth, [&name] { return str(".", name.cast<std::string>()); });
    }
  }

  // `fields` is what the other end compares with its own class beside the name.
  void put_class(PyObject* node, const std::string& fields = {}) {
    const std::string name = name_of(Py_TYPE(node));
    if (name.find("<locals>") != std::string::npos) {
      refuse(str(name, " is defined inside a function, where the other rank cannot find it"));
    }
    if (named(name).ptr() != reinterpret_cast<PyObject*>(Py_TYPE(node))) {
      refuse(str(name, " is not the class that its module has under that name, where the other rank looks for it"));
    }
    put_text(name + fields);
  }

  template <typename Step>
  void below(PyObject* node, int depth, const Step& step) {
    try {
      visit(node, depth + 1);
    } catch (Misfit& misfit) {
      misfit.place.insert(0, step());
      throw;
    }
  }

  FlatTree& flat_;
};

}  // namespace

const at::Tensor& FlatTree::tensor(std::size_t i) const { return THPVariable_Unpack(leaves[i].ptr()); }

FlatTree flatten(py::handle tree) {
  FlatTree flat;
  try {
    Flattener(flat).visit(tree.ptr(), 0);
  } catch (const Misfit& misfit) {
    throw Error(ErrorKind::kInvalidArgument, misfit.to_text());
  }
  return flat;
}

DType dtype_of_leaf(const FlatTree& flat, std::size_t i) {
  const at::Tensor& tensor = flat.tensor(i);
  const auto dtype = movable_dtype_of(tensor);
  HPCOMM_REQUIRE(dtype.has_value(), leaf_names(flat.structure)[i], " is of dtype ", c10::toString(tensor.scalar_type()),
                 ", which messages do not carry");
  return *dtype;
}

}  // namespace hpcomm
