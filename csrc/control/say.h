// Lines on stderr from a thread that must not wait for whoever reads them.
#pragma once

#include <string_view>

namespace hpcomm::control {

// Writes what stderr takes at once: a pipe that nobody empties, or a terminal that was stopped, gets the rest never.
void say(std::string_view text) noexcept;

}  // namespace hpcomm::control
