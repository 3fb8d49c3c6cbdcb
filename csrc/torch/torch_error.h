// Our errors on their way through torch: autograd and c10d translate torch's own exception types only.
// Defined in bind_errors.cpp.
#pragma once

#include <exception>

#include "base/error.h"

namespace hpcomm {

// The error in a form that leaves torch, loss.backward() for instance, as its class of hpcomm/errors.py.
[[nodiscard]] std::exception_ptr visible_to_torch(const Error& error);
// The same for one of ours; others pass unchanged.
[[nodiscard]] std::exception_ptr visible_to_torch(std::exception_ptr error);

}  // namespace hpcomm
