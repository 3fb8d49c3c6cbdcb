// What both ends of a lane route share: messages as operations of a communicator's lane, on every transport. Headers
// and schemas go ahead over Control, the packed part and each large tensor are sends and receives of one group. Where
// Control is faster than an operation, a message goes behind its header, as far as there is room or the receiver waits
// for it (engine/window.h). lane_send.cpp and lane_recv.cpp are the ends.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "comm/device_slot.h"
#include "engine/edge.h"
#include "engine/rendezvous.h"

namespace hpcomm::lane_route {

// Messages in one Communicator::group(), alike on both ends. Every transport takes so many.
inline constexpr std::size_t kMostInGroup = 256;

[[nodiscard]] inline BufferView bytes_at(const Communicator& communicator, void* data, std::size_t bytes) {
  return {data, bytes, bytes, DType::kUInt8, communicator.device()};
}

// Whether what is enqueued on the lane comes in its order, and is issued when the call returns: then a slot may be used
// by the next message while the device is at this one. A host lane runs its tasks later, and holds their slots.
[[nodiscard]] inline bool in_stream_order(const Communicator& communicator) {
  return communicator.device().type == DeviceType::kCuda;
}

// SendRoute::has_header(): where Control is fast, what goes behind a header need not wait for its receive to be posted.
// A message without elements is its header alone. A graph has neither, when it is launched.
[[nodiscard]] inline bool has_header(const Communicator& communicator, const Parcel& parcel) {
  return parcel.bytes() > 0 ? communicator.bytes_in_control() > 0 : !communicator.compute()->is_capturing();
}

// Null where messages keep their place in the order of issue.
[[nodiscard]] inline std::shared_ptr<const Rendezvous> make_rendezvous(const EdgeConfig& config, std::uint64_t edge) {
  return config.movable && config.communicator->device_slot() != nullptr
             ? std::make_shared<const Rendezvous>(*config.communicator, config.peer, edge)
             : nullptr;
}

// `views` through `operation`, as many at once as a group takes: both ends cut alike. A single one needs no group.
template <typename Operation>
std::vector<WorkPtr> issue_all(Communicator& communicator, const std::vector<BufferView>& views,
                               const Operation& operation) {
  std::vector<WorkPtr> works;
  works.reserve(views.size());
  for (std::size_t begin = 0; begin < views.size(); begin += kMostInGroup) {
    const std::size_t end = std::min(views.size(), begin + kMostInGroup);
    const auto issue = [&] {
      for (std::size_t i = begin; i < end; ++i) {
        works.push_back(operation(views[i]));
      }
    };
    if (end - begin == 1) {
      issue();
    } else {
      communicator.group(issue);
    }
  }
  return works;
}

// Of operations that ran where they were issued: throws the first error.
inline void wait_for_all(const std::vector<WorkPtr>& works) {
  for (const WorkPtr& work : works) {
    work->wait();
  }
}

}  // namespace hpcomm::lane_route
