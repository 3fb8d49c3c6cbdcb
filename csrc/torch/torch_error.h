// Our errors on their way through torch: autograd and c10d translate torch's own exception types only.
#pragma once

#include <torch/csrc/Exceptions.h>

#include <exception>

#include "base/error.h"

namespace hpcomm {

// An Error as a torch::PyTorchError, which names its Python class.
struct TorchError final : torch::PyTorchError {
  explicit TorchError(const Error& why) : torch::PyTorchError(why.what()), error(why) {}

  // torch calls it with the GIL held, when the exception reaches Python. The module keeps the class alive.
  PyObject* python_type() override;

  Error error;
};

// The same error in a form that leaves loss.backward() as its class of hpcomm/errors.py. Others pass unchanged.
[[nodiscard]] std::exception_ptr visible_to_torch(std::exception_ptr error);

}  // namespace hpcomm
