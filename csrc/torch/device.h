// What differs between CPU and CUDA tensors at the seam. Twin files: device_cuda.cpp, and device_cpu.cpp in builds
// without CUDA.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <string>

#include "base/view.h"
#include "stream/stream.h"

namespace hpcomm {

[[nodiscard]] bool built_with_cuda() noexcept;

[[nodiscard]] Device device_of(const c10::Device& device);
[[nodiscard]] c10::Device torch_device(Device device);

// The stream that this thread computes on: the caller itself on CPU, torch's current stream on CUDA (looked up at each
// use). One object per device, for the life of the process.
[[nodiscard]] const std::shared_ptr<Stream>& compute_stream(Device device);

// Makes the stream of a lane of `device`: a worker thread on CPU; a stream from torch's pool on CUDA, with a priority
// that its name decides (stream/cuda_lanes.h). One per call.
[[nodiscard]] std::function<std::shared_ptr<Stream>(const std::string& lane)> lane_streams(Device device);

// Runs `body` while torch's current stream is `lane`, where that is a CUDA stream: what it records belongs to the lane.
void with_current(Stream& lane, const std::function<void()>& body);

// Throws kInvalidArgument, with what to do, when `device` cannot be used in this process.
void require_usable(Device device);

}  // namespace hpcomm
