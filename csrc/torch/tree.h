// Trees of Python objects around tensors, to a Structure and back. Containers, numbers and strings of Python's own,
// and dataclasses and named tuples that both ends have imported; never pickle.
#pragma once

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/dtype.h"

namespace hpcomm {

// With the GIL.
struct FlatTree {
  std::string structure;
  // The tensors, in the order of the structure: Python's objects, for torch asks the interpreter at each count of a
  // tensor that has one.
  std::vector<pybind11::object> leaves;
  // The first of them whose class is neither torch.Tensor nor torch.nn.Parameter, and the name of that class.
  std::optional<std::pair<std::size_t, std::string>> subclass;

  [[nodiscard]] const at::Tensor& tensor(std::size_t i) const;
};

// Throws kInvalidArgument with the place of what cannot travel.
[[nodiscard]] FlatTree flatten(pybind11::handle tree);

// Of tensor `i`. Throws kInvalidArgument, with its place, for one that messages do not carry.
[[nodiscard]] DType dtype_of_leaf(const FlatTree& flat, std::size_t i);

// The way back; calls none of the classes that it builds. Throws kProtocol when `structure` is damaged or has another
// number of tensors, kSchemaMismatch, with the place, when this program has no such class, or one with other fields.
[[nodiscard]] pybind11::object unflatten(std::string_view structure, std::vector<at::Tensor> tensors);
// Of a structure that has been looked through, and has so many places for tensors.
[[nodiscard]] pybind11::object unflatten(std::string_view structure, std::size_t places,
                                         std::vector<at::Tensor> tensors);

}  // namespace hpcomm
