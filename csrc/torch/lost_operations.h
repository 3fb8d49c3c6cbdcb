// Operations of a GPU that ended without a result, while the program is ahead of its device and waits for none of them:
// the main thread raises why.
#pragma once

#include "base/error.h"

namespace hpcomm {

// From now on NCCL's watchdog tells. With the GIL, where a job begins: what the program has been told of earlier ones
// does not count. Nothing in a forked child of a process that has called it.
void raise_lost_operations();

// Throws what tell_main_thread() has told and nothing has raised; nothing where the program has been given an error of
// a failure since the job began. With the GIL.
void check_lost_operations();

// Once, until it is raised. From any thread, without the GIL.
void tell_main_thread(const Error& why) noexcept;

}  // namespace hpcomm
