// pack / unpack: one kernel that copies N tensors into a Layout's buffer (scale, then cast, fused), and back.
#pragma once

#include <memory>
#include <vector>

#include "base/view.h"
#include "plan/layout.h"
#include "stream/stream.h"

namespace hpcomm {

// A factor that is read when the kernel runs, not when it is issued: the 1 / weight of a step is known only after
// the last loss. Lives on the device of the stream. An empty Scale means 1.
struct Scale {
  std::shared_ptr<const double> factor;
};

// Copies contiguous tensors into `buffer` at the places of `layout`. `tensors[i]` may be null when its entry is to be
// filled with zeros (a parameter without a gradient). Floating point tensors are multiplied by `scale` in the wider
// of float32 and their own type, then cast to the wire type. Other tensors are copied.
// The memory must stay valid until the stream has passed this call: `keepalive` is held until then.
// Throws kInvalidArgument when counts differ, the buffer is too short, or a cast is not supported.
void pack(Stream& stream, const Layout& layout, const std::vector<const void*>& tensors, const BufferView& buffer,
          const Scale& scale = {}, Keepalive keepalive = nullptr);

// The way back: entry i of `buffer` to `tensors[i]`; null skips an entry. Scaled and cast likewise.
void unpack(Stream& stream, const Layout& layout, const BufferView& buffer, const std::vector<void*>& tensors,
            const Scale& scale = {}, Keepalive keepalive = nullptr);

// Each of `buffers` *= scale, in place. Floating point buffers only.
void scale(Stream& stream, const std::vector<BufferView>& buffers, const Scale& scale, Keepalive keepalive = nullptr);

// One contiguous run of elements: what the host plans and a kernel executes.
struct CopyItem {
  const void* source = nullptr;  // null: zeros
  void* target = nullptr;
  std::size_t count = 0;
  DType source_dtype = DType::kFloat32;
  DType target_dtype = DType::kFloat32;
};

// The kernel behind the three, one twin per device. `factor` may be null.
void run_copies_cpu(const std::vector<CopyItem>& items, const double* factor);
// Launched on the stream's native handle; pointers, `factor` included, are the device's. pack_cuda.cu, and
// pack_no_cuda.cpp in builds without CUDA.
void launch_copies_cuda(Stream& stream, const std::vector<CopyItem>& items, const double* factor);
// False for the casts that no kernel has.
[[nodiscard]] bool can_convert(DType from, DType to) noexcept;
// False for floating point types that can only be copied (float8).
[[nodiscard]] bool can_scale(DType dtype) noexcept;

}  // namespace hpcomm
