// Streams of a CUDA device. Twin files: cuda_stream.cpp, and no_cuda_stream.cpp in builds without CUDA.
#pragma once

#include <functional>
#include <memory>

#include "stream/stream.h"

namespace hpcomm {

// A lane on `device` that issues on a foreign cudaStream_t, which outlives it (PyTorch's pool never destroys its
// streams). Throws kInvalidArgument in builds without CUDA, and for a device that is not there.
//
// Memory in hold() goes at a later call once the device has passed it, at the latest with the stream, whose destructor
// waits for that up to 10 s; what the device cannot pass is kept for ever. CUDA's errors are kTransport. Inside a graph
// capture no event is asked about: see docs/explanation/streams.md.
[[nodiscard]] std::shared_ptr<Stream> make_cuda_stream(void* handle, int device);

// The compute stream of a CUDA rank: whichever stream `current()` names at the moment of each call.
[[nodiscard]] std::shared_ptr<Stream> make_cuda_caller_stream(std::function<void*()> current, int device);

}  // namespace hpcomm
