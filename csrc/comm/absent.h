// Who of a group is missing, for the errors of those that wait for all of it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "control/control.h"

namespace hpcomm {

// The first of `ranks` (of the job) that left, in the order in which this rank heard of it: those that followed may
// have left because of it. None while a failure of the job is known, which says more.
[[nodiscard]] std::optional<int> first_left(const Control& control, const std::vector<int>& ranks);

// "; nothing has been heard from rank 1 for 8 s" of those of `ranks` that are silent, or nothing. One that is alone in
// it becomes the peer of `what`, where that has none.
[[nodiscard]] std::string told_of_silence(const Control& control, const std::vector<int>& ranks, ErrorContext& what);

}  // namespace hpcomm
