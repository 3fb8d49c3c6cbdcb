// Lines on stderr, as far as there is room.
#include "control/say.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace hpcomm::control {

void say(std::string_view text) noexcept {
  while (!text.empty()) {
    pollfd room{STDERR_FILENO, POLLOUT, 0};
    if (::poll(&room, 1, 0) != 1 || (room.revents & POLLOUT) == 0) {
      return;
    }
    // A pipe that has room has it for so many bytes.
    const ssize_t took = ::write(STDERR_FILENO, text.data(), std::min<std::size_t>(text.size(), PIPE_BUF));
    if (took < 0 && errno != EINTR) {
      return;
    }
    text.remove_prefix(static_cast<std::size_t>(std::max<ssize_t>(took, 0)));
  }
}

}  // namespace hpcomm::control
