// pack / unpack: one kernel that copies N tensors into a Layout's buffer (scale, then cast, fused), and back.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/error.h"
#include "base/view.h"
#include "plan/layout.h"
#include "stream/stream.h"

namespace hpcomm {

// What numbers are multiplied by. A default-made Scale means 1.
struct Scale {
  // Read when the kernel runs, not when it is issued: the 1 / weight of a step is known only after the last loss. Lives
  // on the device of the stream.
  std::shared_ptr<const double> factor;
  // Where there is no such factor: known when the kernel is issued, and travels with it.
  double constant = 1.0;

  [[nodiscard]] bool is_one() const noexcept { return factor == nullptr && constant == 1.0; }
};

// Where a kernel reports infinities and NaNs that it meets; lives on the device of the stream. The caller sets it to
// INT32_MAX; it ends as the smaller of what it was and the first index (of a tensor, or a buffer) that has such a
// value. Looked at is the source times the scale, before the cast: what the cast itself makes infinite does not count.
// One stream at a time writes it. An empty FiniteCheck costs nothing.
struct FiniteCheck {
  std::shared_ptr<std::int32_t> first_bad;
};

// Who reads what a kernel writes. Other cores do not find it in the cache of this one: for them the CPU's kernel writes
// large tensors past it. What is so little that it stays in a cache which cores share is better written as for this
// core. Makes no difference on GPUs.
enum class Reader : std::uint8_t { kThisCore, kOthers };

// Copies contiguous tensors into `buffer` at the places of `layout`. `tensors[i]` may be null when its entry is to be
// filled with zeros (a parameter without a gradient). Floating point tensors are multiplied by `scale` in the wider
// of float32 and the two types, then cast to the wire type: rounded to nearest, ties to even; what is too large becomes
// infinity, or the largest number in float8_e4m3fn, as in torch. Other tensors are copied. CPU and GPU give the same
// bits, except that a NaN which arithmetic makes has the sign and payload that the hardware gives it.
// The memory must stay valid until the stream has passed this call: `keepalive` is held until then.
// Throws kInvalidArgument when counts differ, the buffer is too short, or a cast is not supported.
void pack(Stream& stream, const Layout& layout, const std::vector<const void*>& tensors, const BufferView& buffer,
          const Scale& scale = {}, Keepalive keepalive = nullptr, const FiniteCheck& check = {},
          Reader reader = Reader::kThisCore);

// The way back: entry i of `buffer` to `tensors[i]`; null skips an entry. Scaled and cast likewise.
void unpack(Stream& stream, const Layout& layout, const BufferView& buffer, const std::vector<void*>& tensors,
            const Scale& scale = {}, Keepalive keepalive = nullptr);

// Each of `buffers` *= scale, in place. Floating point buffers only.
void scale(Stream& stream, const std::vector<BufferView>& buffers, const Scale& scale, Keepalive keepalive = nullptr,
           const FiniteCheck& check = {});

// Fills `buffer` with zero bytes.
void clear(Stream& stream, const BufferView& buffer, Keepalive keepalive = nullptr);

// One contiguous run of elements: what the host plans and a kernel executes. In 24 bytes, because the CPU's kernel goes
// through thousands of them: with 32, the list is an eighth of what it reads for as many tensors of 256 bytes.
struct CopyItem {
  static constexpr std::size_t kMost = (std::size_t{1} << 40) - 1;  // elements

  CopyItem() : CopyItem(nullptr, nullptr, 0, DType::kFloat32, DType::kFloat32) {}
  // Throws kInvalidArgument when there are more than kMost elements.
  CopyItem(const void* from, void* to, std::size_t elements, DType from_dtype, DType to_dtype,
           Reader who = Reader::kThisCore)
      : source(from), target(to), count(elements), source_dtype(from_dtype), target_dtype(to_dtype), reader(who) {
    HPCOMM_REQUIRE(elements <= kMost, "a tensor of ", elements, " elements is too large for a kernel");
  }

  const void* source;  // null: zeros
  void* target;
  std::uint64_t count : 40;  // elements
  DType source_dtype : 8;
  DType target_dtype : 8;
  Reader reader : 8;
};
static_assert(sizeof(CopyItem) == 24);

// Each item in one launch: what pack() does for a Layout, where sources and targets lie anywhere. Items without
// elements and those whose source is their target do nothing.
void copy(Stream& stream, std::vector<CopyItem> items, Keepalive keepalive = nullptr);

// The kernel behind them all, one twin per device. `factor` and `first_bad` may be null.
void run_copies_cpu(const std::vector<CopyItem>& items, const double* factor, std::int32_t* first_bad = nullptr);
// Launched on the stream's native handle; pointers, those in `scale` and `first_bad` included, are the device's.
// Allocates nothing, waits for nothing, may be captured into a graph. pack_cuda.cu, and pack_no_cuda.cpp in builds
// without CUDA. Throws kInvalidArgument when a tensor does not start at a multiple of its element size, kTransport with
// the words of the CUDA runtime.
void launch_copies_cuda(Stream& stream, const std::vector<CopyItem>& items, const Scale& scale,
                        std::int32_t* first_bad);
// Loads every kernel of pack/ onto the current device. Until then, CUDA may load a kernel when it is first launched,
// and wait for the device while it does: behind a collective that waits for this rank that is a deadlock. Call it
// before the first stream of a device is used. Throws kTransport when this copy of hpcomm has no code for the device.
void load_kernels_cuda();
// False for the casts that no kernel has.
[[nodiscard]] bool can_convert(DType from, DType to) noexcept;
// True for the floating point types.
[[nodiscard]] bool can_scale(DType dtype) noexcept;

}  // namespace hpcomm
