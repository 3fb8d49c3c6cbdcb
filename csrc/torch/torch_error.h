// Our errors on their way through autograd, whose translation to Python knows torch's exception types only.
#pragma once

#include <exception>

namespace hpcomm {

// The same error in a form that leaves loss.backward() as its class of hpcomm/errors.py. Others pass unchanged.
[[nodiscard]] std::exception_ptr visible_to_torch(std::exception_ptr error);

}  // namespace hpcomm
