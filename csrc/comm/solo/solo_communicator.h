// A world of one: every collective is a copy.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace hpcomm {

[[nodiscard]] std::shared_ptr<Communicator> make_solo_communicator(CommunicatorConfig config);

}  // namespace hpcomm
