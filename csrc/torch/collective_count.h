// A backend that counts what torch's comparison of ranks compares: collectives, in which all of them take part.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace hpcomm {

// `inner`, gloo say, with a sequence number of its own. gloo's counts messages as well, of which ranks that do nothing
// wrong have different numbers; torch's ProcessGroupWrapper puts the number beside shape and dtype and takes that for a
// mismatch.
[[nodiscard]] c10::intrusive_ptr<c10d::Backend> count_collectives(c10::intrusive_ptr<c10d::Backend> inner);

}  // namespace hpcomm
