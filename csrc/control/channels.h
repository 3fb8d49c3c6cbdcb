// The channels of Control that have fixed numbers. Edges, splits and the like take 64-bit hashes of their names
// instead.
#pragma once

#include <cstdint>

namespace hpcomm::control {

// Those below 16 are of this library's own start. Which ranks share memory:
inline constexpr std::uint64_t kMeetChannel = 2;
inline constexpr std::uint64_t kReachChannel = 3;
// What goes beside NearControl, through the Control below it:
inline constexpr std::uint64_t kDetourChannel = 4;

// From 16 to 98303, that is, below 2^16 + 2^15: the Python layer's (hpcomm/control_channels.py).
inline constexpr std::uint64_t kFirstPythonChannel = 16;

}  // namespace hpcomm::control
