// The first rank of a job is told what the others wait in when that takes long, and shows it: who hangs sees at once
// which rank is where.
#pragma once

#include <chrono>
#include <memory>

#include "control/control.h"

namespace hpcomm {

// From now on waits of this process that take longer than `after` are told of through `control`, while it lasts; of
// several jobs through that of the most ranks, the first of equals. Zero: none is.
void tell_long_waits(const std::shared_ptr<Control>& control, std::chrono::milliseconds after);

// Called by threads of the program again and again while they wait, without the GIL; `in_main_thread` says where in
// Python that is. Never throws: nobody waits worse for it.
void look_at_wait(bool in_main_thread) noexcept;
// CommunicatorConfig::lane_poll: the same for a lane whose operations a program waits for by other means than ours, as
// by torch's futures. It is silent while a thread of the program is known to wait.
void look_at_lane() noexcept;

}  // namespace hpcomm
