// Checks, the list of copies, and the one place that chooses between the kernels of the CPU and those of CUDA.
#include "pack/pack.h"

#include <cstdint>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "pack/step_math.h"

namespace hpcomm {

namespace {

void require_buffer(const Layout& layout, std::size_t tensors, const BufferView& buffer) {
  HPCOMM_REQUIRE(tensors == layout.entries().size(), "the layout has ", layout.entries().size(), " entries, got ",
                 tensors, " tensors");
  HPCOMM_REQUIRE(buffer.bytes >= layout.bytes(), "the layout needs ", layout.bytes(), " bytes, the buffer has ",
                 buffer.bytes);
}

// One of the two, in the stream's order; `memory` is held until the stream has passed it.
template <typename OnCuda, typename OnCpu>
void run_on(Stream& stream, Keepalive memory, OnCuda on_cuda, OnCpu on_cpu) {
  if (stream.device().type == DeviceType::kCuda) {
    on_cuda();
    stream.hold(std::move(memory));
  } else {
    stream.enqueue([on_cpu = std::move(on_cpu), memory = std::move(memory)] { on_cpu(); });
  }
}

void launch(Stream& stream, std::vector<CopyItem> items, const Scale& scale, Keepalive keepalive,
            const FiniteCheck& check) {
  for (const CopyItem& item : items) {
    HPCOMM_REQUIRE(can_convert(item.source_dtype, item.target_dtype), "no kernel casts ", to_string(item.source_dtype),
                   " to ", to_string(item.target_dtype));
  }
  HPCOMM_REQUIRE(check.first_bad == nullptr || items.size() < INT32_MAX, "too many tensors to number them");
  const auto shared = std::make_shared<const std::vector<CopyItem>>(std::move(items));
  std::int32_t* const first_bad = check.first_bad.get();
  using Memory = std::tuple<std::shared_ptr<const double>, std::shared_ptr<std::int32_t>, Keepalive>;
  run_on(
      stream, std::make_shared<const Memory>(scale.factor, check.first_bad, std::move(keepalive)),
      [&] { launch_copies_cuda(stream, *shared, scale, first_bad); },
      [shared, scale, first_bad] {
        const double* const constant = scale.is_one() ? nullptr : &scale.constant;
        run_copies_cpu(*shared, scale.factor != nullptr ? scale.factor.get() : constant, first_bad);
      });
}

}  // namespace

void pack(Stream& stream, const Layout& layout, const std::vector<const void*>& tensors, const BufferView& buffer,
          const Scale& scale, Keepalive keepalive, const FiniteCheck& check, Reader reader) {
  require_buffer(layout, tensors.size(), buffer);
  std::vector<CopyItem> items;
  items.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Layout::Entry& entry = layout.entries()[i];
    items.push_back(
        {tensors[i], static_cast<char*>(buffer.data) + entry.offset, entry.count, entry.dtype, entry.wire, reader});
  }
  launch(stream, std::move(items), scale, std::move(keepalive), check);
}

void unpack(Stream& stream, const Layout& layout, const BufferView& buffer, const std::vector<void*>& tensors,
            const Scale& scale, Keepalive keepalive) {
  require_buffer(layout, tensors.size(), buffer);
  std::vector<CopyItem> items;
  items.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Layout::Entry& entry = layout.entries()[i];
    if (tensors[i] != nullptr) {
      items.push_back(
          {static_cast<const char*>(buffer.data) + entry.offset, tensors[i], entry.count, entry.wire, entry.dtype});
    }
  }
  launch(stream, std::move(items), scale, std::move(keepalive), {});
}

void copy(Stream& stream, std::vector<CopyItem> items, Keepalive keepalive) {
  launch(stream, std::move(items), {}, std::move(keepalive), {});
}

void scale(Stream& stream, const std::vector<BufferView>& buffers, const Scale& scale, Keepalive keepalive,
           const FiniteCheck& check) {
  std::vector<CopyItem> items;
  items.reserve(buffers.size());
  for (const BufferView& buffer : buffers) {
    HPCOMM_REQUIRE(is_floating(buffer.dtype), "only floating point buffers are scaled, this one is ",
                   to_string(buffer.dtype));
    items.push_back({buffer.data, buffer.data, buffer.count, buffer.dtype, buffer.dtype});
  }
  launch(stream, std::move(items), scale, std::move(keepalive), check);
}

void clear(Stream& stream, const BufferView& buffer, Keepalive keepalive) {
  launch(stream, {{nullptr, buffer.data, buffer.bytes, DType::kUInt8, DType::kUInt8}}, {}, std::move(keepalive), {});
}

void finish_loss(Stream& stream, double* sums, double* factor, bool accumulate, Keepalive keepalive, StepKinds kinds) {
  run_on(
      stream, std::move(keepalive), [&] { launch_finish_loss_cuda(stream, sums, factor, accumulate, kinds); },
      [=] { run_finish_loss(sums, factor, accumulate, kinds); });
}

}  // namespace hpcomm
